#!/bin/bash
# Judges what the agent left in the working folder; the reward is the share of the hidden tests that pass.
set -u
export REWARD_FILE=${LOGS_DIR:-/logs}/verifier/reward.json
tests=${TESTS_DIR:-/tests}
mkdir -p "$(dirname "$REWARD_FILE")"
cd "${WORKDIR:-/app}" || exit 1
# Nothing of the working folder (-P), or above the tests, may stand in for the runner and its options.
alone=(-c /dev/null --rootdir "$tests" --confcutdir "$tests" -p no:cacheprovider)
export PYTHONDONTWRITEBYTECODE=1
python3 -P -m pytest -rA "${alone[@]}" --junitxml="$(dirname "$REWARD_FILE")/junit.xml" "$tests/test_tojsonl.py"
python3 -P - <<'END'
import json, os, pathlib
from xml.etree import ElementTree

reward = pathlib.Path(os.environ["REWARD_FILE"])
suite = ElementTree.parse(reward.with_name("junit.xml")).getroot().find("testsuite")
total = int(suite.get("tests"))
passed = total - sum(int(suite.get(kind)) for kind in ("failures", "errors", "skipped"))
reward.write_text(json.dumps({"reward": round(passed / total, 4), "passed": passed, "total": total}))
END
