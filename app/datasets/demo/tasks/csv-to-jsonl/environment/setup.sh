#!/bin/sh
# An empty project with samples. WORKDIR: where (default /app).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
target=${WORKDIR:-/app}
mkdir -p "$target"
cp -R "$here/samples" "$target/"
