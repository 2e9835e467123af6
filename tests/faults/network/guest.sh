#!/bin/bash
# First process of the guest: a file server, eight machines that mount it, then the scenarios.
# The kernel's command line gives, as variables: here, python, out, protocol, scenarios (a,b,…).
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/run TMPDIR=/run PYTHONPYCACHEPREFIX=/run/pyc
export here python protocol

shut_down() { echo o >/proc/sysrq-trigger; sleep 10; }
trap shut_down EXIT

# The root is the host's own tree, read-only; what has to be written lies in memory, or on the disk.
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mountpoint -q /dev || mount -t devtmpfs dev /dev
mkdir -p /dev/shm
for folder in /run /mnt /dev/shm /var/lib/nfs; do mount -t tmpfs tmpfs "$folder"; done
mkdir /run/out
mount -t hostfs -o "$out" none /run/out || { echo "no folder for results"; exit 1; }
ulimit -c 0

# The guest's kernel has its modules in a folder that modprobe does not know.
mkdir -p /run/modules/lib/modules
ln -s "/usr/lib/uml/modules/$(uname -r)" /run/modules/lib/modules/
printf '#!/bin/sh\nexec modprobe -d /run/modules "$@"\n' >/run/modprobe
chmod +x /run/modprobe
echo /run/modprobe >/proc/sys/kernel/modprobe
/run/modprobe veth

mkdir /mnt/export
mkfs.ext4 -qF /dev/ubda && mount /dev/ubda /mnt/export && chmod 755 /mnt/export

# Each machine has a network and a name of its own: to the server they are as good as eight hosts.
for n in 1 2 3 4 5 6 7 8; do
    cat <<LINKS
netns add m$n
link add v$n type veth peer name eth0 netns m$n
addr add 10.9.$n.1/24 dev v$n
link set v$n up
LINKS
done | ip -batch - && ip link set lo up || { echo "no network"; exit 1; }
"$here/server.sh" start || { echo "no server"; exit 1; }
for n in 1 2 3 4 5 6 7 8; do
    printf 'addr add 10.9.%d.2/24 dev eth0\nlink set eth0 up\nlink set lo up\n' "$n" |
        ip -n "m$n" -batch -
    "$here/mount.sh" "$n" "/mnt/m$n" || { echo "machine $n cannot mount"; exit 1; }
done
grep -E ' (nfs|nfs4|cifs) ' /proc/mounts >/run/out/mounts
echo "ready at $(cut -d' ' -f1 /proc/uptime) s"

for name in ${scenarios//,/ }; do
    timeout -k 5 150 "$python" "$here/scenarios.py" "$name" \
        >"/run/out/$name.json" 2>"/run/out/$name.err"
    echo "$name: exit status $?, at $(cut -d' ' -f1 /proc/uptime) s"
done
dmesg >/run/out/dmesg
