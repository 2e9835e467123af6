#!/bin/bash
# `server.sh start|stop`: the file server of the guest, which exports /mnt/export.
case $protocol-$1 in
nfs*-start)
    if ! mountpoint -q /proc/fs/nfsd; then
        # One port for locks: eight clients in this one kernel tell rpcbind of theirs, too.
        /run/modprobe lockd nlm_tcpport=4045 nlm_udpport=4045
        for module in nfsd nfs nfsv3 nfsv4; do /run/modprobe "$module"; done
        mkdir -p /run/rpcbind /var/lib/nfs/{sm,sm.bak,v4recovery,rpc_pipefs}
        touch /var/lib/nfs/{etab,rmtab,xtab}
        # Debian's own asks the server's /etc/group; here what the client says is enough.
        printf '[mountd]\nmanage-gids=n\n' >/run/nfs.conf
        mount --bind /run/nfs.conf /etc/nfs.conf
        mount -t nfsd nfsd /proc/fs/nfsd
        mount -t rpc_pipefs rpc_pipefs /var/lib/nfs/rpc_pipefs
        rpcbind -w && rpc.statd && rpc.mountd
    fi
    for n in 1 2 3 4 5 6 7 8; do
        exportfs -i -o rw,sync,no_root_squash,no_subtree_check,fsid=0 "10.9.$n.2:/mnt/export"
    done
    rpc.nfsd -G 10 -L 10 4
    ;;
nfs*-stop)
    rpc.nfsd 0
    ;;
smb-start)
    if [ ! -d /run/samba ]; then
        for module in cifs hmac md4 md5 cmac aes ecb ccm gcm ctr sha256 sha512; do
            /run/modprobe "$module" 2>/dev/null
        done
        mkdir -p /run/samba/{lock,state,cache,private,ncalrpc}
        # Two members of a team, beside root.
        cp /etc/passwd /etc/group /run/
        echo "team:x:3000:ann,bob" >>/run/group
        for user in ann:2001 bob:2002; do
            echo "${user%:*}:x:${user#*:}:3000::/:/bin/sh" >>/run/passwd
        done
        mount --bind /run/passwd /etc/passwd && mount --bind /run/group /etc/group
        for user in root ann bob; do
            printf 'secret\nsecret\n' | smbpasswd -c "$here/smb.conf" -a -s "$user"
        done
    fi
    smbd -D -s "$here/smb.conf" -l /run/samba
    for _ in $(seq 100); do
        ss -ltn | grep -q ':445 ' && exit 0
        sleep 0.1
    done
    exit 1
    ;;
smb-stop)
    pkill -9 -x smbd
    sleep 0.2
    ;;
esac
