#!/bin/sh
# Starts this bundle's Python wherever the bundle is mounted. The libraries it is linked with may be missing in a slim
# image, and variables meant for the image's Python would mislead it; the start of the interpreter (sitecustomize) gives
# the variables back to whatever is started from it.
tool=$(cd -P -- "${0%/*}/.." && pwd) || exit 126
for name in LD_LIBRARY_PATH PYTHONHOME PYTHONPATH; do
    eval "[ -z \"\${$name+x}\" ] || export MEGAFLOW_KEPT_$name=\"\$$name\""
done
unset PYTHONHOME PYTHONPATH name
LD_LIBRARY_PATH=$tool/lib MEGAFLOW_LAUNCHER=$tool/bin/python3
export LD_LIBRARY_PATH MEGAFLOW_LAUNCHER
unset tool
exec "${MEGAFLOW_LAUNCHER%/*/*}/python/bin/python@VERSION@" -s "$@"
