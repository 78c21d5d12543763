"""Does the report say what the instruction asks for, on the given log and on one that the agent has not seen?"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HIDDEN = Path(__file__).with_name("hidden.log")


def report(file):
    done = subprocess.run([sys.executable, "report.py", str(file)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_given_log():
    assert report("access.log") == {
        "requests": 7,
        "skipped": 1,
        "errors": 2,
        "bytes": 5742,
        "top": [["198.51.100.4", 2], ["203.0.113.7", 2], ["192.0.2.200", 1]],
    }


@pytest.mark.parametrize(("key", "expected"), [("requests", 9), ("skipped", 2), ("errors", 3), ("bytes", 5000000112)])
def test_a_figure_of_an_unseen_log(key, expected):
    assert report(HIDDEN)[key] == expected


def test_equally_busy_clients_are_in_the_order_of_their_addresses():
    assert report(HIDDEN)["top"] == [["2001:db8::42", 3], ["10.0.0.10", 2], ["10.0.0.9", 2]]


def test_an_empty_log_is_no_error():
    assert report(os.devnull) == {"requests": 0, "skipped": 0, "errors": 0, "bytes": 0, "top": []}
