#!/bin/bash
# Judges what the agent left in the working folder; writes 1 or 0 to verifier/reward.txt.
set -u
logs=${LOGS_DIR:-/logs}/verifier
tests=${TESTS_DIR:-/tests}
mkdir -p "$logs"
cd "${WORKDIR:-/app}" || exit 1
# Nothing of the working folder (-P), or above the tests, may stand in for the runner and its options.
alone=(-c /dev/null --rootdir "$tests" --confcutdir "$tests" -p no:cacheprovider)
if PYTHONDONTWRITEBYTECODE=1 python3 -P -m pytest -rA "${alone[@]}" "$tests/test_settings.py"; then
    echo 1 >"$logs/reward.txt"
else
    echo 0 >"$logs/reward.txt"
fi
