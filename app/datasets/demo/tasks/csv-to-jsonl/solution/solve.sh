#!/bin/bash
set -eu
cd "${WORKDIR:-/app}"
cp "${SOLUTION_DIR:-/solution}/tojsonl.py" tojsonl.py
