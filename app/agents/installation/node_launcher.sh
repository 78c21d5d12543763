#!/bin/sh
# Starts this bundle's Node wherever the bundle is mounted, on the image's C++ library or, where there is none, on ours.
tool=$(cd -P -- "${0%/*}/.." && pwd) || exit 126
for folder in /usr/lib/*-linux-gnu /lib/*-linux-gnu /usr/lib64 /lib64 /usr/lib /lib; do
    if [ -e "$folder/libstdc++.so.6" ]; then exec "$tool/node/bin/node" "$@"; fi
done
LD_LIBRARY_PATH=$tool/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH
exec "$tool/node/bin/node" "$@"
