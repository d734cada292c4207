#!/usr/bin/env bash
# udm's NBD server beside nbdkit and qemu-storage-daemon, and beside an older udm if one is given. usage: nbd.sh UDM [ROUNDS [SECONDS [OLDER]]]
# Prints, for each kind of load, every server's median and its ratio to udm's, round by round. See nbd.py.
set -euo pipefail
for program in nbdkit qemu-storage-daemon nbdcopy fio python3; do
    command -v "$program" >/dev/null || { echo "skipped: $program is not installed"; exit 0; }
done
exec python3 "$(dirname "$0")/nbd.py" "$@"
