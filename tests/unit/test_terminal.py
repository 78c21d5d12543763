"""The recording of what is run in environments: readable by a player, bounded, without secrets, from many threads."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from app.artifacts import open_store
from app.errors import EnvironmentFailed
from app.models.outcome import ArtifactKind
from app.models.shell import CommandResult
from app.workers.evidence import Evidence
from app.workers.terminal import MOST_BYTES, RecordedShell, Terminal
from tests.unit.folder_shell import FolderShell

SECRET = "mf-0123456789abcdef"


def read(recording: bytes) -> tuple[dict[str, Any], list[list[Any]]]:
    """Header and events of a recording, which must be one that a player takes."""
    header, *events = [json.loads(line) for line in recording.splitlines()]
    assert header["version"] == 2
    assert all(isinstance(header[name], int) for name in ("width", "height", "timestamp"))
    times = [at for at, _, _ in events]
    assert times == sorted(times)
    assert all(at >= 0 for at in times)
    assert {kind for _, kind, _ in events} <= {"o", "m"}
    return header, events


def shown(recording: bytes) -> str:
    return "".join(text for _, kind, text in read(recording)[1] if kind == "o")


@pytest.fixture
def shell(tmp_path: Path) -> FolderShell:
    return FolderShell(tmp_path)


def finished(terminal: Terminal, stage: str, text: str, stdout: bytes, **named: Any) -> None:
    values = {"exit_code": 0, "timed_out": False, "truncated": False, "duration_s": 1.0, "stderr": b""} | named
    terminal.begin(stage, text).finish(CommandResult(stdout=stdout, **values))


def test_commands_are_shown_with_their_outputs_and_ends(shell: FolderShell) -> None:
    terminal = Terminal()
    recorded = RecordedShell(terminal, "agent", shell)
    assert recorded.run("printf 'a\\nb'; echo no >&2; exit 3", timeout_s=10).exit_code == 3
    assert recorded.run("cat", stdin=b"typed\n", timeout_s=10).stdout == b"typed\n"
    recorded.put("/testbed/x", b"1")
    assert recorded.get("/testbed/x") == b"1"
    header, events = read(terminal.pack([]))
    first, second = header["commands"]
    assert (first[2:], second[2:]) == (
        ["agent", "exit code 3", "printf 'a\\nb'; echo no >&2; exit 3"],
        ["agent", "", "cat"],
    )
    assert 0 <= first[0] <= first[1] <= second[0] <= second[1]
    assert abs(header["timestamp"] + first[0] - time.time()) < 60
    assert [text for _, kind, text in events if kind == "m"] == [f"agent: {first[4]}", "agent: cat"]
    text = shown(terminal.pack([]))
    assert "a\r\nbno\r\n\x1b[31m[exit code 3]" in text
    assert "$ cat\r\n\x1b[2mtyped\x1b[0m\r\ntyped\r\n" in text


def test_a_stream_is_recorded_as_it_comes(shell: FolderShell) -> None:
    terminal = Terminal()
    program = RecordedShell(terminal, "agent", shell).stream(["sh", "-c", "echo 1; sleep 0.3; echo 2; read x; echo $x"])
    program.write(b"3\n")
    program.close_input()
    while program.read(5):
        pass
    program.close()
    header, events = read(terminal.pack([]))
    one, two = (next(at for at, kind, text in events if kind == "o" and text.startswith(f"{n}\r\n")) for n in "12")
    assert 0.2 < two - one < 5
    assert header["commands"][0][1] >= two
    assert "\x1b[2m3\x1b[0m" in shown(terminal.pack([]))


def test_a_secret_is_nowhere_also_in_two_pieces() -> None:
    terminal = Terminal()
    finished(terminal, "agent", f"curl -H {SECRET}", f"key {SECRET}".encode(), stderr=SECRET.encode())
    stream = terminal.begin("agent", "tail -f", sent=SECRET.encode())
    stream.write(b"before\n" + SECRET[:7].encode())
    time.sleep(0.1)
    stream.write(SECRET[7:].encode() + b" after")
    stream.close()
    assert len(stream.pieces([])) == 2
    recording = terminal.pack([SECRET])
    assert SECRET[7:] not in recording.decode()
    assert "before\r\n[redacted] after" in shown(recording)


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_output_is_cut_and_says_so(*, stream: bool) -> None:
    terminal, output = Terminal(), b"head" + b"x" * (1 << 20) + b"tail"
    if stream:
        command = terminal.begin("agent", "yes")
        for at in range(0, len(output), 5000):
            command.write(output[at : at + 5000])
        command.close()
    else:
        finished(terminal, "agent", "yes", output)
    text = shown(terminal.pack([]))
    assert "head" in text
    assert text.rstrip().endswith("bytes left out ...]" if stream else "tail")
    assert "bytes left out" in text
    assert len(text) < 300_000


def test_much_is_bounded_and_leaves_room_for_the_grading() -> None:
    terminal = Terminal()
    for _ in range(100):
        finished(terminal, "agent", "escapes", b"\x1b" * 60_000)
    for number in range(5000):
        finished(terminal, "agent", f"true {number}", b"")
    finished(terminal, "grading", "pytest", b"1 passed\n")
    recording = terminal.pack([])
    header, _ = read(recording)
    assert len(recording) < 2 * MOST_BYTES
    assert header["commands"][-1][4] == "pytest"
    assert "the recording is full" in shown(recording)


def test_a_command_is_shown_and_not_obeyed_and_an_output_is() -> None:
    terminal = Terminal()
    finished(terminal, "agent", "printf '\x1b[2J\x00\udcff\x07'\nls", b"\x1b[31mred\x00\xff\x1b[?1049h")
    finished(terminal, "agent", "ls", b"")
    text = shown(terminal.pack([]))
    assert "printf '^[[2J?'\r\nls\r\n\x1b[31mred\ufffd\x1b[?1049h" in text
    assert "\x1b[?1047l\x1b[!p\x1b[0m" in text, "what follows is on the first screen again"


def test_what_fails_and_what_goes_on_is_told() -> None:
    terminal = Terminal()

    class Gone:
        put = get = put_tree = get_tree = None

        def run(self, *_: object, **__: object) -> CommandResult:
            raise EnvironmentFailed("gone")

    with pytest.raises(EnvironmentFailed):
        RecordedShell(terminal, "agent", Gone()).run("ls", timeout_s=1)  # type: ignore[arg-type]
    terminal.begin("agent", "sleep 1000")
    assert [row[3] for row in read(terminal.pack([]))[0]["commands"]] == ["EnvironmentFailed", "it had not ended"]


def test_a_graders_part_comes_behind_the_agents() -> None:
    first, second = Terminal(), Terminal()
    finished(first, "agent", "ls", b"x\n")
    earlier = first.pack([])
    finished(second, "grading", "pytest", b"1 passed\n")
    header, _ = read(second.pack([], earlier))
    assert [row[2] for row in header["commands"]] == ["agent", "grading"]
    assert header["timestamp"] == read(earlier)[0]["timestamp"]
    assert shown(second.pack([], earlier)).index("x\r\n") < shown(second.pack([], earlier)).index("1 passed")


def test_the_artifact_is_the_recording_or_says_why_there_is_none(tmp_path: Path) -> None:
    evidence, store = Evidence(), open_store(f"file://{tmp_path}/store")
    (kind,) = evidence.kinds = (ArtifactKind.TERMINAL,)
    (none,) = evidence.store(store, "r", redact=[])
    assert (none.kind, none.key, none.missing) == (kind, None, "no command was run")
    finished(evidence.terminal, "agent", f"echo {SECRET}", b"")
    (one,) = evidence.store(store, "r", redact=[SECRET])
    assert "echo [redacted]" in shown(store.get(one.key))
    store.put("earlier", b"no recording")
    evidence.earlier_terminal = "earlier"
    (broken,) = Evidence(kinds=evidence.kinds, terminal=evidence.terminal, earlier_terminal="earlier").store(
        store, "r", redact=[]
    )
    assert "could not be made" in (broken.missing or "")
