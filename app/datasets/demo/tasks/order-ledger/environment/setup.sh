#!/bin/sh
# The damaged database and its schema. WORKDIR: where (default /app).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
target=${WORKDIR:-/app}
mkdir -p "$target"
cp "$here/schema.sql" "$target/"
python3 "$here/make_db.py" "$here/schema.sql" "$target/shop.db"
