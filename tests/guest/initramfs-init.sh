#!/bin/busybox sh
# First program of a guest: mounts the host's root read-only under a layer of memory, the exchange folder, and goes on
# with the init script that lies there.
B=/bin/busybox
$B mount -t proc proc /proc
$B mount -t sysfs sys /sys
$B mount -t devtmpfs dev /dev
for module in /modules/*.ko; do
    [ -e "$module" ] && { $B insmod "$module" || echo "cannot load $module"; }
done
share() { $B mount -t 9p -o "trans=virtio,version=9p2000.L,msize=512000,$3" "$1" "$2" || $B poweroff -f; }
share root /lower ro,cache=loose
$B mount -t tmpfs -o size=75% layer /layer
$B mkdir -p /layer/upper /layer/work
$B mount -t overlay -o lowerdir=/lower,upperdir=/layer/upper,workdir=/layer/work root /new || $B poweroff -f
$B mkdir -p /new/proc /new/sys /new/dev /new/run /new/exchange /new/jit
share exchange /new/exchange rw
share jit /new/jit rw
for folder in proc sys dev; do $B mount --move /$folder /new/$folder; done
exec $B switch_root /new /bin/bash /exchange/.guest/init.sh
