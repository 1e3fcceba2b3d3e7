#!/bin/sh
# hvd-await-hosts HOSTFILE COMMAND..      run COMMAND once every host of HOSTFILE can be logged into
#
# Schedulers start launcher and workers at once; for up to HVD_PATIENCE seconds (300) this waits for the last.
set -eu
hosts=$(awk 'NF && $1 !~ /^#/ {print $1}' "$1")
[ -n "$hosts" ] || { echo "hvd-await-hosts: $1 names no host" >&2; exit 1; }
shift
until=$(($(date +%s) + ${HVD_PATIENCE:-300}))
for host in $hosts; do
    until ssh -o BatchMode=yes "$host" true 2>/tmp/await.$$; do
        if [ "$(date +%s)" -ge "$until" ]; then
            echo "hvd-await-hosts: $host cannot be logged into: $(cat /tmp/await.$$)" >&2
            exit 1
        fi
        sleep 2
    done
done
rm -f /tmp/await.$$
exec "$@"
