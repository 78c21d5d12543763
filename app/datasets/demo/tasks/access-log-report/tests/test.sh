#!/bin/bash
# Judges what the agent left in the working folder; writes 1 or 0 to verifier/reward.txt.
set -u
logs=${LOGS_DIR:-/logs}/verifier
tests=${TESTS_DIR:-/tests}
mkdir -p "$logs"
cd "${WORKDIR:-/app}" || exit 1
if PYTHONDONTWRITEBYTECODE=1 python3 -m pytest -rA -p no:cacheprovider "$tests/test_report.py"; then
    echo 1 >"$logs/reward.txt"
else
    echo 0 >"$logs/reward.txt"
fi
