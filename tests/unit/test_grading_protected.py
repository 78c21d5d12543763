"""Which changed files are the image's again before a script judges."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from app.grading.protected import decide
from app.host import layer_files
from app.models.shell import FileAction


@dataclass(frozen=True)
class File:
    path: str
    in_image: bool = False
    content: bytes | None = b""  # None: a link
    others: frozenset[str] = field(default_factory=frozenset)

    deleted: bool = False
    removable: bool = True
    target: str = ""

    def image_has(self, path: str) -> bool:
        return path in self.others

    def read(self) -> bytes | None:
        return self.content


STANDARD = frozenset({"/usr/lib/python3.11/os.py", "/usr/lib/python3.11/argparse.py"})
RUNNER = frozenset(
    {"/usr/lib/python3/dist-packages/attr/__init__.py", "/usr/lib/python3/dist-packages/_pytest/main.py"}
)
CORE = frozenset({"/usr/lib/x86_64-linux-gnu/perl-base/strict.pm", "/usr/share/perl/5.36/Test/More.pm"})


@pytest.mark.parametrize(
    "file",
    [
        File("/usr/bin/bash", in_image=True),
        File("/opt/venv/bin/python3.12", in_image=True),
        File("/usr/local/bin/python3", others=frozenset({"/usr/bin/python3"})),
        File("/root/bin/curl", others=frozenset({"/usr/bin/curl"})),
        File("/root/.local/bin/comm", others=frozenset({"/usr/bin/comm"})),
        File("/opt/venv/bin/mktemp", others=frozenset({"/usr/bin/mktemp", "/opt/venv/bin"})),
        File("/usr/bin/mktemp", in_image=True),
        File("/usr/bin/python3", in_image=True, deleted=True),
        File("/etc/alternatives/awk", in_image=True),
        File("/usr/lib/git-core/git-status", in_image=True),
        File("/usr/lib/python311.zip"),
        File("/usr/local/lib/python312.zip/sitecustomize/__init__.py"),
        File("/usr/lib/python3.11/pytest.py", others=STANDARD),
        File("/usr/lib/python3.11/attr/__init__.py", others=STANDARD),
        File("/usr/lib/python3.11/argparse/__init__.py", others=STANDARD),
        File("/usr/lib/python3.11/argparse.cpython-311-x86_64-linux-gnu.so", others=STANDARD),
        File("/usr/lib/python3.11/_json.py", others=STANDARD),
        File("/usr/lib/python3/dist-packages/attr/__init__.py", in_image=True),
        File("/usr/local/lib/python3.11/dist-packages/attr/__init__.py", others=RUNNER),
        File("/root/.local/lib/python3.11/site-packages/attr.py", others=RUNNER),
        File("/usr/lib/python3/dist-packages/_pytest/main.so", others=RUNNER),
        File("/app/.venv/pyvenv.cfg", in_image=True),
        File("/etc/perl/strict.pm", others=CORE),
        File("/usr/share/perl5/Test/More.pm", others=CORE),
        File("/usr/lib/x86_64-linux-gnu/perl-base/strict.pm", in_image=True),
        File("/root/.cache/uv/archive-v0/x/pytest/__init__.py"),
        File("/usr/local/lib/python3.11/dist-packages/usercustomize/__init__.py"),
        File("/root/.local/lib/python3.11/site-packages/usercustomize.cpython-311-x86_64-linux-gnu.so"),
        File("/usr/local/lib/python3.11", content=None),
        File("/usr/local/lib/python3.11/dist-packages", content=None),
        File("/etc/ssl/openssl.cnf", in_image=True),
        File("/etc/nsswitch.conf", in_image=True),
        File("/etc/passwd", in_image=True, content=b""),
        File("/etc/group", in_image=True, content=None),
        File("/usr/lib/x86_64-linux-gnu/libnss_evil.so.2"),
        File("/etc/apt/apt.conf.d/99evil", content=b'APT::Update::Pre-Invoke {"evil";};\n'),
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
        File("/app/venv/bin/python3", others=frozenset({"/usr/bin/python3"})),  # the agent's own environment
        File("/app/bin/date", others=frozenset({"/usr/bin/date"})),
        File("/usr/bin/nginx", in_image=True, deleted=True),  # a package was removed
        File("/opt/python/lib/python3.12/_strptime.py"),  # built by the agent
        File("/usr/lib/python3.11/ensurepip/__init__.py", others=STANDARD),
        File("/usr/lib/python3.11/config-3.11-x86_64-linux-gnu/python.o", others=STANDARD),
        File("/usr/share/perl5/JSON.pm", others=CORE),
        File("/usr/lib/cgi-bin/answer", in_image=True),
        File(
            "/root/.gitconfig",
            content=b"[user]\n\tname = Me\n[safe]\n\tdirectory = *\n[init]\n\tdefaultBranch = main\n",
        ),
        File("/root/.gitconfig", content=b'[filter "lfs"]\n\tclean = git-lfs clean -- %f\n\trequired = true\n'),
        File("/app/.git/config", content=b'[core]\n\tbare = false\n[remote "origin"]\n\turl = /srv/x.git\n'),
        File("/root/.gitconfig", content=b"[core]\n\tpager = cat\n[alias]\n\tst = status\n"),
        File("/app/.git/config", content=b"[core]\n\thooksPath = .husky/_\n"),
        File("/app/venv/lib/python3.11/site-packages/packaging/__init__.py", others=RUNNER),  # the agent's own
        File(
            "/app/venv/lib/python3.11/site-packages/anyio-4.dist-info/entry_points.txt", content=b"[pytest11]\nx = y\n"
        ),
        File("/etc/apt/apt.conf.d/99proxy", content=b'Acquire::http::Proxy "http://127.0.0.1:3128";\n'),
        File(
            "/etc/passwd", in_image=True, content=b"root:x:0:0:root:/root:/bin/bash\nme:x:1000:1000::/home/me:/bin/sh\n"
        ),
        File("/etc/pip.conf", content=b"[global]\nbreak-system-packages = true\n"),
    ],
    ids=lambda file: file.path,
)
def test_what_a_task_may_ask_for_is_kept(file: File) -> None:
    assert decide(file) is FileAction.KEEP


@pytest.mark.parametrize(
    "file",
    [
        File("/usr/bin/mktemp", in_image=True, removable=False),  # a package of the system was renewed
        File("/root/.cache/uv/archive-v0/x/requests/__init__.py", removable=False),
        File("/usr/local/bin/mktemp", others=frozenset({"/usr/bin/mktemp"}), removable=False),
        File("/app/venv/lib/python3.11/site-packages/_virtualenv.pth", content=b"import _virtualenv", removable=False),
    ],
    ids=lambda file: file.path,
)
def test_what_installers_change_is_not_suspect_where_it_cannot_be_put_back(file: File) -> None:
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
        File("/root/.gitconfig", content=b"[core]\n\tfsmonitor = /srv/evil\n"),
        File("/app/.git/config", content=b"[core] fsmonitor=/srv/evil\n"),
        File("/app/.git/config", content=b'[diff "x"]\n\tcommand = /srv/evil\n'),
        File("/app/.git/config", content=b'[submodule "x"]\n\tupdate = !/srv/evil\n'),
        File("/root/.gitconfig", content=b"[core]\n\thooksPath = /opt/h\n"),
        File("/root/.config/git/config", content=b"[uploadpack]\n\tpackObjectsHook = /opt/p\n"),
        File("/root/.gitconfig", content=b"[init]\n\ttemplateDir = /opt/t\n"),
        File("/etc/gitconfig", content=b"[include]\n\tpath = /srv/evil\n"),
        File("/root/.gitconfig", content=None),
        File("/app/.git/config.worktree", content=b"[core]\nfsmonitor = /srv/evil\n"),
        File("/app/.git/hooks/post-index-change"),
        File("/app/pytest", content=None),
        File("/usr/lib/python3/dist-packages/link.pth", content=None),
        File("/usr/lib/python3/dist-packages/cr.pth", content=b"/app\rimport evil\n"),
        File("/usr/lib/python3/dist-packages/zip.pth", content=b"/srv/evil.zip\n"),
        File("/usr/lib/python3/dist-packages/x-1.dist-info/entry_points.txt", content=None),
        File("/usr/lib/python3/dist-packages/z-1.dist-info", content=None),
        File("/usr/lib/python3/dist-packages/z.egg-info", content=None),
        File("/usr/lib/python3/dist-packages/y-1.dist-info/entry_points.txt", content=b"#" * (64 << 10)),
        File("/etc/passwd", in_image=True, content=b"root:x:0:0:root:/root:/srv/evil\n"),
        File("/root/.config/pip/pip.conf", content=b"[global]\nno-index = true\nfind-links = /srv/wheels\n"),
    ],
    ids=lambda file: file.path,
)
def test_what_could_change_the_judge_and_may_be_wanted_is_suspect(file: File) -> None:
    assert decide(file) is FileAction.SUSPECT


def test_a_standard_name_where_the_judge_starts_is_suspect_unless_the_task_asks_for_it() -> None:
    for path in ("/app/json.py", "/app/argparse/__init__.py", "/app/argparse/__init__.pyc", "/app/attr.py"):
        assert decide(File(path), workdir="/app") is FileAction.SUSPECT
        assert decide(File(path), workdir="/srv") is FileAction.KEEP
        assert decide(File(path, in_image=True), workdir="/app") is FileAction.KEEP
    assert decide(File("/app/calendar.py"), workdir="/app", stated="Write calendar.py.") is FileAction.KEEP
    assert decide(File("/app/json.py"), workdir="/app", stated="Write it as json.") is FileAction.SUSPECT
    assert decide(File("/app/tools/json.py"), workdir="/app") is FileAction.KEEP


def test_a_tool_that_is_to_be_repaired_or_installed_is_the_tasks() -> None:
    tac = File("/usr/bin/tac", in_image=True)
    assert decide(tac) is FileAction.PUT_BACK
    assert decide(tac, stated="Repair `tac`, which is broken.") is FileAction.KEEP
    assert decide(tac, stated="The command tac is broken.") is FileAction.KEEP
    assert decide(tac, stated="Print it in the order of tac.") is FileAction.PUT_BACK
    git = File("/usr/local/bin/git", others=frozenset({"/usr/bin/git"}))
    assert decide(git) is FileAction.PUT_BACK
    assert decide(git, stated="Install git 2.50 with the prefix /usr/local.") is FileAction.KEEP


def test_a_usual_program_that_the_task_uses_is_suspect_where_it_comes_first() -> None:
    for name, text in (
        ("cat", "Check it with `cat`."),
        ("git", "The git command shows /usr/share/x."),
        ("cat", "/ cat"),
    ):
        for folder in ("/usr/local/bin", "/usr/sbin", "/sbin"):
            file = File(f"{folder}/{name}", others=frozenset({f"/usr/bin/{name}"}))
            assert decide(file, stated=text) in (FileAction.SUSPECT, FileAction.PUT_BACK)
    make = File("/usr/local/bin/make", others=frozenset({"/usr/bin/make"}))
    assert decide(make, stated="Put your own make into /usr/local/bin/.") is FileAction.KEEP


def test_a_configuration_that_is_not_gits_is_kept() -> None:
    for content in (b"users:\n- user:\n    exec:\n      command: aws\n", b"Host x\n  ProxyCommand nc %h\n"):
        assert decide(File("/root/.kube/config", content=content)) is FileAction.KEEP


def test_a_hook_is_suspect_unless_the_task_is_about_hooks() -> None:
    for place in ("/app/.git/hooks/post-checkout", "/usr/share/git-core/templates/hooks/post-checkout"):
        assert decide(File(place)) is FileAction.SUSPECT
    asked = "Install a pre-commit hook."
    assert decide(File("/app/.git/hooks/pre-commit"), stated=asked) is FileAction.KEEP
    assert decide(File("/app/.git/hooks/pre-commit.sample")) is FileAction.KEEP
    assert decide(File("/app/src/hooks/useState.ts")) is FileAction.KEEP
    assert decide(File("/app/.git/hooks/post-index-change"), stated=asked) is FileAction.SUSPECT
    assert decide(File("/usr/share/git-core/templates/hooks/update"), stated=asked) is FileAction.SUSPECT


@pytest.mark.parametrize(
    "target",
    [
        *("/tests/expected", "../tests", "/", "../../..", "/usr/../tests/expected", "//tests/x", "usr/../../tests/x"),
        *("d/../tests/expected", "/proc/self/root/tests/x", "/proc/1/cwd", "/proc/7/task/7/root"),
    ],
)
def test_a_link_to_the_hidden_tests_is_suspect(target: str) -> None:
    link = File("/app/answer", content=None, target=target)
    assert decide(link, hidden="/tests") is FileAction.SUSPECT
    assert decide(link) is FileAction.KEEP, "there are none in this container"


@pytest.mark.parametrize(
    "target", ["tests/a.txt", "../lib/x.js", "/usr/lib/x", "/proc/mounts", "../other/tests", "/dev/stdout"]
)
def test_other_links_are_kept(target: str) -> None:
    assert decide(File("/app/sub/link", content=None, target=target), hidden="/tests") is FileAction.KEEP


def test_a_program_that_the_task_names_is_its_product() -> None:
    image = frozenset({"/usr/bin/sqlite3"})
    file = File("/usr/local/bin/sqlite3", others=image)
    assert decide(file) is FileAction.PUT_BACK
    assert decide(file, stated="Build it to /usr/local/bin/sqlite3.") is FileAction.KEEP
    shell = File("/usr/bin/bash", in_image=True)
    assert decide(shell, stated="Look at /usr/bin/bash.") is FileAction.PUT_BACK


def test_metadata_far_below_is_looked_at_and_what_lies_further_still_is_suspect(tmp_path: Path) -> None:
    packages = "/usr/lib/python3/dist-packages"
    plugin = tmp_path / packages.strip("/") / "/".join("a" * 30) / "x-1.dist-info" / "entry_points.txt"
    beyond = tmp_path / "srv" / "/".join("a" * 210) / "x-1.dist-info" / "entry_points.txt"
    for place in (plugin, beyond):
        place.parent.mkdir(parents=True)
        place.write_text("[pytest11]\nx = x\n")
    (tmp_path / packages.strip("/") / "y-1.dist-info").symlink_to("/srv/a")
    put_back, suspect = layer_files.put_back(tmp_path, (), decide)
    assert put_back == ()
    assert set(suspect) == {
        f"/{plugin.relative_to(tmp_path)}",
        f"{packages}/y-1.dist-info",
        f"/srv/{'/'.join('a' * 199)}",
    }
