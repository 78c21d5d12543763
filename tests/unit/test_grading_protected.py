"""Which changed files are the image's again before a script judges."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from app.grading.protected import decide
from app.models.shell import FileAction

EDITABLE = b"import __editable___x_finder; __editable___x_finder.install()"


@dataclass(frozen=True)
class File:
    path: str
    in_image: bool = False
    content: bytes = b""
    others: frozenset[str] = field(default_factory=frozenset)

    def image_has(self, path: str) -> bool:
        return path in self.others

    def read(self) -> bytes:
        return self.content


@pytest.mark.parametrize(
    "file",
    [
        File("/usr/bin/bash", in_image=True),
        File("/opt/venv/bin/python3.12", in_image=True),
        File("/usr/local/bin/python3", others=frozenset({"/usr/bin/python3"})),
        File("/root/bin/curl", others=frozenset({"/usr/bin/curl"})),
        File("/etc/ld.so.preload"),
        File("/etc/ld.so.conf.d/evil.conf"),
        File("/lib/x86_64-linux-gnu/libc.so.6", in_image=True),
        File("/usr/lib/python3.11/json/decoder.py", in_image=True),
        File("/usr/lib/python3.11/sitecustomize.py"),
        File("/usr/lib/python3/dist-packages/_pytest/runner.py", in_image=True),
        File("/usr/bin", in_image=True),
        File("/usr", in_image=True),
        File("/etc/python3.11/sitecustomize.py", in_image=True),
        File("/usr/bin/pyvenv.cfg"),
        File("/usr/lib/python3.11/__pycache__/argparse.cpython-311.pyc", in_image=True),
        File("/lib/x86_64-linux-gnu/libm.so.6", in_image=True),
        File("/usr/lib/x86_64-linux-gnu/libz.so.1.2.13", in_image=True),
    ],
    ids=lambda file: file.path,
)
def test_what_runs_the_judge_is_put_back(file: File) -> None:
    assert decide(file) is FileAction.PUT_BACK


@pytest.mark.parametrize(
    "file",
    [
        File("/app/solution.py"),
        File("/usr/local/bin/report", in_image=True),  # the task's own program
        File("/usr/local/bin/jq"),  # installed by the agent: the image has none
        File("/usr/lib/python3/dist-packages/requests/api.py", in_image=True),
        File("/usr/lib/python3/dist-packages/pytest/__init__.py"),  # installed by the agent
        File("/usr/lib/python3/dist-packages/thing.pth", content=b"/app/src\n"),
        File(
            "/usr/lib/python3/dist-packages/__editable__.x.pth",
            content=b"import __editable___x_finder; __editable___x_finder.install()",
        ),
        File("/etc/profile", in_image=True),
        File("/app/mine.pth", content=b"import mine\n"),  # no interpreter looks there
    ],
    ids=lambda file: file.path,
)
def test_what_a_task_may_ask_for_is_kept(file: File) -> None:
    assert decide(file) is FileAction.KEEP


@pytest.mark.parametrize("path", ["/app/pytest.py", "/app/_pytest/__init__.py", "/app/pluggy.so", "/conftest.py"])
def test_a_module_in_place_of_the_test_runner_is_suspect_unless_the_image_has_it(path: str) -> None:
    assert decide(File(path)) is FileAction.SUSPECT
    assert decide(File(path, in_image=True)) is FileAction.KEEP
    assert decide(File("/app/conftest.py")) is FileAction.KEEP


@pytest.mark.parametrize(
    "file",
    [
        File("/usr/lib/python3/dist-packages/zz.pth", content=b"import os; os.system('cheat')\n"),
        File("/usr/lib/python3/dist-packages/a1.pth", content=b"import coverage_mine\n"),
        File("/usr/lib/python3/dist-packages/a2.pth", content=b"import _virtualenv; cheat\n"),
        File("/usr/lib/python3/dist-packages/long.pth", content=b"#" * (64 << 10)),
        File("/usr/lib/python3/dist-packages/mine-1.dist-info/entry_points.txt", content=b"[pytest11]\nx = mine\n"),
        File("/app/mine-1.dist-info/entry_points.txt", content=b"[pytest11]\nx = mine\n"),
        File("/usr/local/lib/python3.11/dist-packages/pytest.py"),
        File("/app/pytest.py"),
        File("/pytest.ini"),
    ],
    ids=lambda file: file.path,
)
def test_what_could_change_the_judge_and_may_be_wanted_is_suspect(file: File) -> None:
    assert decide(file) is FileAction.SUSPECT
