#!/bin/sh
# A client that comes back whatever happens: the server is not up yet, the network was away, the device was restarted.
cd "$(dirname "$0")" || exit 1
. ./settings
while true; do
    fedstride deploy client --server "$SERVER" --number "$NUMBER" --keys . --data data.py --memory memory
    sleep 10
done
