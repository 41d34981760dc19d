#!/bin/bash
# Process 1 of a guest, with the host's root as its own: network, Soft-RoCE and device nodes, then the agent. Its output
# goes to the console log. settings.sh says: ident, wired, mtu, n_rails, modules, python, port.
. /exchange/.guest/settings.sh
need() { "$@" || { echo "guest: failed: $*"; exit 1; }; }
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
# A stray PID 1 that ends is a kernel panic, which tells nothing: whatever fails below, the guest is switched off.
trap 'sync; echo o >/proc/sysrq-trigger; sleep 10' EXIT

mount -t tmpfs run /run
mkdir -p /run/lock /dev/pts /dev/shm
mount -t tmpfs shm /dev/shm
mount -t devpts devpts /dev/pts
mount -t cgroup2 cgroup2 /sys/fs/cgroup
ln -sfn /proc/self/fd /dev/fd
for i in 0 1 2; do ln -sfn /proc/self/fd/$i /dev/$(echo stdin stdout stderr | cut -d' ' -f$((i + 1))); done
mkdir -p /lib/modules
need mount --bind "$modules" /lib/modules
echo "guest$ident" >/proc/sys/kernel/hostname
printf '127.0.0.1 localhost\n10.77.0.1 guest0\n10.77.0.2 guest1\n' >/etc/hosts
ulimit -l unlimited
ulimit -n 65536

ip link set lo up
# No udev: modules that a device would call for are loaded by name, and its nodes are made below.
need modprobe -a virtio_console virtio_net rdma_rxe rdma_ucm ib_umad
for ((rail = 0; rail < n_rails; rail++)); do
    mac=$(printf '52:54:00:77:%02x:%02x' "$rail" "$ident")
    [ "$wired" = 1 ] || need ip link add "eth$rail" address "$mac" type dummy
    need ip link set "eth$rail" mtu "$mtu" up
    need ip address add "10.77.$rail.$((ident + 1))/24" dev "eth$rail"
    need rdma link add "rxe$rail" type rxe netdev "eth$rail"
done
mkdir -p /dev/infiniband
for device in /sys/class/infiniband_verbs/uverbs* /sys/class/infiniband_mad/umad* /sys/class/misc/rdma_cm; do
    node=/dev/infiniband/${device##*/}
    [ -e "$device/dev" ] && [ ! -e "$node" ] && mknod "$node" c $(tr : ' ' <"$device/dev")
done

for name in /sys/class/virtio-ports/*/name; do
    [ "$(cat "$name")" = "$port" ] && node=/dev/$(basename "$(dirname "$name")")
done
cd /exchange
"$python" -I -S /exchange/.guest/agent.py "$node"
