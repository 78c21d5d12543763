"""Parts of running a framework that need none: its time, its outputs, what is collected, who suits whom."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.agents.installation.checkouts import split_ref
from app.agents.installation.libraries import Needs, require
from app.agents.running.clock import Clock
from app.agents.running.collecting import LEFT_OUT, collect_inside
from app.agents.running.outputs import Output
from app.errors import AgentUnsuitable
from app.models.shell import CommandResult, Shell


class Told:
    """A shell that has one answer."""

    def __init__(self, text: str, tree: bytes = b"") -> None:
        self._text = text
        self._tree = tree

    def run(self, command: str, **_: object) -> CommandResult:
        return CommandResult(0, self._text.encode(), b"", timed_out=False, truncated=False, duration_s=0.0)

    def get_tree(self, path: str) -> bytes:
        return self._tree


def told(text: str, tree: bytes = b"") -> Shell:
    return Told(text, tree)  # type: ignore[return-value]


def test_time_is_up_only_after_what_it_had_to_wait_and_never_after_twice_the_limit() -> None:
    clock = Clock(0.0, lambda: 1000.0)
    assert clock.is_up(), "as much again as nothing"
    assert not Clock(1000.0, lambda: 0.0).is_up()
    clock = Clock(0.05, lambda: 1000.0)
    threading.Event().wait(0.06)
    assert not clock.is_up()
    assert 0.0 < clock.left_s() <= 0.05


@settings(deadline=None)  # a slow disk is no fault
@given(st.lists(st.text("ab\n", max_size=40).map(str.encode), max_size=30), st.integers(1, 60), st.integers(1, 30))
def test_an_output_is_whole_or_says_how_much_is_missing(pieces: list[bytes], head: int, tail: int) -> None:
    file = Path(tempfile.gettempdir(), f"output-{os.getpid()}")
    output = Output(file, head_bytes=head, tail_bytes=tail)
    for piece in pieces:
        output.write(piece)
    output.close()
    output.close()
    whole, found = b"".join(pieces), file.read_bytes()
    file.unlink()
    if found == whole:
        return
    before, gap, after = found.rpartition(b" bytes are left out here]\n")
    start, _, count = before.rpartition(b"\n[")
    assert gap
    assert whole.startswith(start)
    assert whole.endswith(after)
    assert len(start) + int(count) + len(after) == len(whole)
    assert len(start) <= head
    assert len(after) <= 2 * tail
    if b"\n" in whole[:head]:
        assert start.endswith(b"\n"), "a line is whole or missing"


def test_nothing_of_an_archive_comes_to_lie_elsewhere(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, kind in (
            ("fine/file", tarfile.REGTYPE),
            ("../outside", tarfile.REGTYPE),
            ("/absolute", tarfile.REGTYPE),
            ("link", tarfile.SYMTYPE),
            ("link/below", tarfile.REGTYPE),
            ("pipe", tarfile.FIFOTYPE),
            ("fine/file/below", tarfile.REGTYPE),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.size, member.linkname, member.mode = kind, 0, str(tmp_path), 0o4777
            tar.addfile(member, io.BytesIO())
    into = tmp_path / "into"
    collect_inside(told("", buffer.getvalue()), "/home", into)
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir()}
    assert found == {"into/fine/file", "into/link/below", f"into/{LEFT_OUT}"}
    assert (into / "fine" / "file").stat().st_mode & 0o7777 == 0o600


NEEDS = Needs("x86_64", "2.35")
OLD = "machine x86_64\nglibc 2.31\n"
ALPINE = "machine x86_64\nmusl /lib/ld-musl-x86_64.so.1\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [(OLD, r"2\.35.*2\.31"), (ALPINE, "musl"), ("machine aarch64\nglibc 2.36\n", "x86_64.*aarch64")],
)
def test_what_cannot_run_it_is_told(text: str, words: str) -> None:
    with pytest.raises(AgentUnsuitable, match=words):
        require(told(text), "toy", NEEDS)


@pytest.mark.parametrize(
    ("source", "url", "ref"),
    [
        ("https://example.org/a/b", "https://example.org/a/b", ""),
        ("https://example.org/a/b@v1.0", "https://example.org/a/b", "v1.0"),
        ("https://example.org/a/b@feature/x", "https://example.org/a/b", "feature/x"),
        ("https://user@example.org/a/b", "https://user@example.org/a/b", ""),
        ("git@example.org:a/b.git", "git@example.org:a/b.git", ""),
        ("git@example.org:a/b.git@main", "git@example.org:a/b.git", "main"),
        ("file:///a/b@main", "file:///a/b", "main"),
    ],
)
def test_an_address_may_name_what_is_asked_of_it(source: str, url: str, ref: str) -> None:
    assert split_ref(source) == (url, ref)
