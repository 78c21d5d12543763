#!/bin/bash
set -eu
cd "${WORKDIR:-/app}"
gone=$(git log -1 --diff-filter=D --format=%H -- config/service.ini)
git checkout --quiet "$gone~1" -- config/service.ini
sed -i 's/^port = .*/port = 9090/' config/service.ini
git add config/service.ini
git commit --quiet -m "Bring the settings back"
