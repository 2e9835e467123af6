#!/bin/bash
# `mount.sh MACHINE FOLDER [USER] [OPTIONS]`: mount the export as that machine does.
n=$1 folder=$2 user=${3:-root} more=${4:+,$4}
server=10.9.$n.1
case $protocol in
nfs3) arguments=(-t nfs -o "vers=3,tcp,hard$more" "$server:/mnt/export") ;;
nfs42) arguments=(-t nfs -o "vers=4.2,hard$more" "$server:/") ;;
smb)
    ids=uid=$(id -u "$user"),gid=$(id -g "$user"),file_mode=0664,dir_mode=02775
    arguments=(-t cifs -o "vers=3.1.1,nosharesock,username=$user,password=secret,$ids$more"
        "//$server/export")
    ;;
esac
mkdir -p "$folder"
if [ "$protocol" = nfs3 ] && [ ! -e "/run/locks-$n" ]; then
    # Locks over NFSv3 take a status daemon on the client's side, too.
    touch "/run/locks-$n"
    nsenter --net="/run/netns/m$n" unshare --mount sh -c '
        mount -t tmpfs tmpfs /run && mkdir /run/rpcbind
        mount -t tmpfs tmpfs /var/lib/nfs && mkdir /var/lib/nfs/sm /var/lib/nfs/sm.bak
        rpcbind -w && rpc.statd'
fi
exec nsenter --net="/run/netns/m$n" unshare --uts \
    sh -c 'hostname "$1"; shift; exec mount "$@"' - "machine$n" "${arguments[@]}" "$folder"
