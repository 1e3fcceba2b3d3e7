#!/bin/sh
# A worker is well when it can be logged into; any other container when it has begun.
role=$(cat "$HOME/.role" 2>/dev/null) || exit 1
[ "$role" = worker ] || exit 0
exec ssh -o BatchMode=yes -o ConnectTimeout=5 127.0.0.1 true
