#!/bin/sh
# The broken script and a log to try it on. WORKDIR: where (default /app).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
target=${WORKDIR:-/app}
mkdir -p "$target"
cp "$here/report.py" "$here/access.log" "$target/"
