#!/usr/bin/env bash
# Compares udm's vhost-user-blk server with qemu-storage-daemon, and with a thread that only copies.
# usage: vhost-user.sh UDM [ROUNDS [SECONDS]]
# vhost_user.py does the work.
set -euo pipefail
for program in qemu-storage-daemon python3; do
    command -v "$program" >/dev/null || { echo "skipped: $program is not installed"; exit 0; }
done
exec python3 "$(dirname "$0")/vhost_user.py" "$@"
