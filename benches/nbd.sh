#!/usr/bin/env bash
# udm beside nbdkit's memory plugin (4 jobs, depth 32) and beside qemu-storage-daemon's null export (depth 1): fio over a Unix
# socket, 4 KiB random, the servers in turn, medians. usage: nbd.sh UDM [ROUNDS [SECONDS]]
set -euo pipefail
udm=$1 rounds=${2:-7} seconds=${3:-3}
for program in fio nbdkit qemu-storage-daemon python3; do
    command -v "$program" >/dev/null || { echo "skipped: $program is not installed"; exit 0; }
done
dir=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; wait 2>/dev/null; rm -rf "$dir"' EXIT

nbdkit -f -U "$dir/nbdkit" memory 1G &
"$udm" serve --device mem='0 2097152 linear mem:1G 0' --device null='0 2097152 linear null:size=1G 0' \
    --unix "$dir/udm" --socket "$dir/control" 2>/dev/null &
qemu-storage-daemon --blockdev driver=null-co,node-name=null,size=1073741824,read-zeroes=off \
    --nbd-server addr.type=unix,addr.path="$dir/qsd" --export type=nbd,id=e,node-name=null,name=null,writable=on &
for _ in $(seq 100); do [ -S "$dir/nbdkit" ] && [ -S "$dir/udm" ] && [ -S "$dir/qsd" ] && break; sleep 0.05; done

# IOPS of one run: socket, export, rw, depth, jobs
iops() {
    fio --name=t --ioengine=nbd --uri="nbd+unix:///$2?socket=$dir/$1" --rw="$3" --iodepth="$4" --numjobs="$5" --bs=4k \
        --size=900M --norandommap --time_based --runtime="$seconds" --group_reporting --output-format=json 2>/dev/null |
        python3 -c 'import json, sys
text = sys.stdin.read()
job = json.loads(text[text.index("{\n"):])["jobs"][0]
assert job["error"] == 0
print(round(job["read"]["iops"] + job["write"]["iops"]))'
}
# Every server's memory is there before anything is measured.
for server in nbdkit: udm:mem; do iops "${server%%:*}" "${server##*:}" write 32 1 >/dev/null; done
for round in $(seq "$rounds"); do
    for rw in randread randwrite; do
        echo "nbdkit-memory $rw 4x32 $(iops nbdkit '' $rw 32 4)"
        echo "udm-mem $rw 4x32 $(iops udm mem $rw 32 4)"
        echo "qsd-null $rw 1x1 $(iops qsd null $rw 1 1)"
        echo "udm-null $rw 1x1 $(iops udm null $rw 1 1)"
    done
    echo "round $round of $rounds" >&2
done >"$dir/figures"
python3 - "$dir/figures" <<'PY'
import collections, statistics, sys
runs = collections.defaultdict(list)
for line in open(sys.argv[1]):
    server, rw, load, iops = line.split()
    runs[load, rw, server].append(int(iops))
print(f"{'jobs x depth':14}{'':12}{'server':16}{'median IOPS':>12}  {'all runs'}")
for (load, rw, server), all_ in sorted(runs.items()):
    print(f"{load:14}{rw:12}{server:16}{statistics.median(all_):12.0f}  {' '.join(map(str, all_))}")
for load, peer, own in (("4x32", "nbdkit-memory", "udm-mem"), ("1x1", "qsd-null", "udm-null")):
    for rw in ("randread", "randwrite"):
        ratio = [b / a for a, b in zip(runs[load, rw, peer], runs[load, rw, own])]
        print(f"{own} is {statistics.median(ratio):.2f} times {peer} at {load}, {rw} (median of the rounds' ratios)")
PY
