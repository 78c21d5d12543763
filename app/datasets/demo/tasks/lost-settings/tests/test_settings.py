"""Is the right version of the settings back, and nothing else changed?"""

import configparser
import subprocess
import sys
from pathlib import Path

HISTORY = [
    "Say how to run it",
    "Orders give their port to billing",
    "Tidy up",
    "Six workers, close idle connections",
    "Limit the size of a body",
    "Service and settings",
]


def git(*arguments):
    return subprocess.run(
        ["git", "-c", "safe.directory=*", *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_the_last_committed_settings_are_back_with_the_new_port():
    settings = configparser.ConfigParser()
    settings.read("config/service.ini")
    assert {name: dict(settings[name]) for name in settings.sections()} == {
        "server": {"host": "127.0.0.1", "port": "9090", "workers": "6"},
        "limits": {"body_bytes": "131072", "idle_s": "30"},
    }


def test_only_the_port_differs_from_what_was_committed():
    before = git("show", "HEAD~3~1:config/service.ini").splitlines()
    after = Path("config/service.ini").read_text().splitlines()
    assert [(old, new) for old, new in zip(before, after, strict=True) if old != new] == [("port = 8080", "port = 9090")]


def test_one_new_commit_adds_the_file_and_nothing_else():
    assert git("log", "--format=%s", "main").splitlines()[1:] == HISTORY
    assert git("show", "--format=", "--name-status", "main").split() == ["A", "config/service.ini"]


def test_the_tree_is_clean_and_the_service_starts():
    assert git("status", "--porcelain") == ""
    done = subprocess.run([sys.executable, "service.py"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ready\n")
