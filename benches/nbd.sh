#!/usr/bin/env bash
# Compares udm's NBD server with nbdkit, qemu-storage-daemon and, optionally, an older udm.
# usage: nbd.sh UDM [ROUNDS [SECONDS [OLDER]]]
# For each load it prints the median of every server, and udm's ratio to it, round by round.
# nbd.py does the work.
set -euo pipefail
for program in nbdkit qemu-storage-daemon nbdcopy fio python3; do
    command -v "$program" >/dev/null || { echo "skipped: $program is not installed"; exit 0; }
done
exec python3 "$(dirname "$0")/nbd.py" "$@"
