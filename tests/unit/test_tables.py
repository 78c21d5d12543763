"""Tables on terminals of several widths and in a pipe; text that tries to steer the terminal."""

from __future__ import annotations

import io
import json

import pytest
from rich.cells import cell_len
from rich.text import Text

from app.cli import show
from app.cli.tables import SafeConsole, Table
from app.texts import clean

NAMES = ("django__django-13251-with-a-rather-long-tail-1", "django__django-13251-with-a-rather-long-tail-2")


def printed(table: Table, width: int, *, terminal: bool = True) -> list[str]:
    out = io.StringIO()
    SafeConsole(file=out, width=width, force_terminal=terminal, color_system=None).print(table)
    return out.getvalue().splitlines()


def a_table() -> Table:
    table = Table("id", "task", "reward", "agent", "mode", "instance", keys=3)
    table.add_row("1a2b3c4d", NAMES[0], "1", "mini-swe-agent", "ephemeral", "process 1234567890123456789012345")
    table.add_row("5e6f7a8b", NAMES[1], "0", "oracle", "persistent", "process 1")
    return table


@pytest.mark.parametrize("width", [40, 80, 140])
def test_nothing_is_wider_than_the_terminal_and_keys_stay(width: int) -> None:
    lines = printed(a_table(), width)
    assert all(len(line) <= width for line in lines)
    for row in ("1a2b3c4d", "5e6f7a8b"):
        assert sum(line.startswith(row) for line in lines) == 1, "one line for each row"
    assert lines[0].split()[:3] == ["id", "task", "reward"]


def test_a_pipe_gets_whole_cells_between_tabs() -> None:
    lines = printed(a_table(), 20, terminal=False)
    assert lines[0] == "id\ttask\treward\tagent\tmode\tinstance"
    assert [line.split("\t")[1] for line in lines[1:]] == list(NAMES)


@pytest.mark.parametrize(
    "hostile",
    [
        "\x1b[2J\x1b[1;1Hgone",
        "\x1b]0;title\x07gone",
        "\x1b]8;;http://x\x1b\\gone\x1b]8;;\x1b\\",
        "\x9b31mgone",
        "\u202egone",
        "gone\x00\x08\x7f",
        "\rgone",
        "\x1bcgone",
        "\x1b(0gone",
        "\ud800gone",
    ],
)
def test_nothing_that_steers_a_terminal_is_left(hostile: str) -> None:
    found = clean(hostile)
    assert "gone" in found
    assert found.isprintable()
    table = Table("name")
    table.add_row(hostile)
    for line in printed(table, 80):
        assert line.isprintable()
    out = io.StringIO()
    SafeConsole(file=out, width=80, force_terminal=True, color_system=None, markup=False).print(f"[red]{hostile}[/]")
    assert "[red]" in out.getvalue(), "markup is text"
    assert out.getvalue().rstrip("\n").isprintable()


def test_text_and_cells_of_wide_letters_are_cleaned_and_fit() -> None:
    out = io.StringIO()
    console = SafeConsole(file=out, width=40, force_terminal=True, color_system=None)
    console.print(Text("a\x1b[2Jb\x9b1m"))
    console.log("c\x1b[2J")
    assert "\x1b" not in out.getvalue()
    assert "\x9b" not in out.getvalue()
    table = Table("name", "n", keys=2)
    table.add_row("漢" * 30, "7")
    (line,) = printed(table, 40)[1:]
    assert cell_len(line) <= 40
    assert line.endswith("7")


def test_json_is_ascii(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(show, "console", SafeConsole(file=out))
    show.as_json({"name": "\x1b[31m \x9b \x7f \u202e \ud800"})
    assert out.getvalue().isascii()
    assert not {letter for letter in out.getvalue() if letter < " " and letter != "\n"} | (
        {"\x7f"} & set(out.getvalue())
    )
    assert json.loads(out.getvalue())["name"].startswith("\x1b[31m")
