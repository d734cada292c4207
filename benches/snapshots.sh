#!/bin/bash
# Measures first and later 4 KiB writes through NBD to a writable snapshot of an image, and to an
# origin with a snapshot. Compares udm with nbdkit's cow filter, and with qcow2 overlays and
# copy-before-write of qemu-storage-daemon. All files are in memory. Prints one line per run, with
# requests per second.
#
#   benches/snapshots.sh UDM [ROUNDS] [SIZE] [DEPTH]
set -u
udm=$(realpath "$1") rounds=${2:-3} size=${3:-256M} depth=${4:-32}
folder=$(mktemp -d /dev/shm/udm-snapshots.XXXXXX)
export TMPDIR=$folder
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit 1
head -c "$(numfmt --from=iec "$size")" /dev/urandom >image
sectors=$(($(stat -c %s image) / 512))

# Writes each block once, then once more. udm's own client needs less CPU time than fio.
writes() { # NAME URI
    for pass in first later; do
        "$udm" bench --nbd "$2" --rw randwrite --bs 4k --iodepth "$depth" --randseed 7 --json |
            awk -v name="$1" -v pass=$pass '
                /"write" *:/ { write = 1 }
                write && /"iops" *:/ { gsub(/[^0-9.]/, ""); printf "%s %s %.0f\n", name, pass, $0; exit }'
    done
}

end() { # PIDFILE
    local pid
    pid=$(cat "$1")
    kill "$pid"
    while kill -0 "$pid" 2>/dev/null; do sleep .05; done
    rm -f ./*.sock "$1"
}

new_store() {
    rm -f store
    truncate -s $(($(stat -c %s image) * 5 / 4)) store
}

serve() { # DEVICE...
    "$udm" serve "$@" --unix "$folder/u.sock" --socket "$folder/c.sock" --fork --pidfile "$folder/pid" 2>/dev/null
}

daemon() { # NODE BLOCKDEV...
    local node=$1
    shift
    qemu-storage-daemon --daemonize --pidfile "$folder/pid" "$@" \
        --nbd-server addr.type=unix,addr.path="$folder/u.sock" \
        --export type=nbd,id=e,node-name="$node",name=s,writable=on
}

uri="nbd+unix:///s?socket=$folder/u.sock"
for ((round = 0; round < rounds; round++)); do
    for kind in P N; do
        new_store
        serve --device s="0 $sectors snapshot image store $kind 8"
        writes "udm-snapshot-$kind" "$uri"
        end pid
    done
    for block in 4096 65536; do
        nbdkit -U "$folder/u.sock" -P "$folder/pid" --filter=cow file image cow-block-size=$block
        writes "nbdkit-cow-$block" "nbd+unix:///?socket=$folder/u.sock"
        end pid
    done
    for cluster in 4k 64k; do
        rm -f over.qcow2
        qemu-img create -q -f qcow2 -b image -F raw -o cluster_size=$cluster over.qcow2
        daemon q --blockdev driver=file,node-name=f,filename=over.qcow2 --blockdev driver=qcow2,node-name=q,file=f
        writes "qcow2-$cluster" "$uri"
        end pid
    done
    for kind in P N none; do
        new_store
        snapshot=(--device k="0 $sectors snapshot image store $kind 8")
        [ $kind = none ] && snapshot=()
        serve --device s="0 $sectors snapshot-origin image" "${snapshot[@]}"
        writes "udm-origin-$kind" "$uri"
        end pid
    done
    rm -f target.qcow2
    qemu-img create -q -f qcow2 target.qcow2 "$(stat -c %s image)"
    daemon c --blockdev driver=file,node-name=f,filename=image \
        --blockdev driver=file,node-name=tf,filename=target.qcow2 --blockdev driver=qcow2,node-name=t,file=tf \
        --blockdev driver=copy-before-write,node-name=c,file=f,target=t
    writes qemu-copy-before-write "$uri"
    end pid
done
