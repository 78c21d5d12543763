"""Draws tables and text that fit the terminal; a pipe gets tab-separated lines.

Columns are ordered by importance. Columns that do not fit are left out from the right, and named. A long key is cut
in its middle, because names have common beginnings. A pipe gets all columns, uncut.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from app.texts import clean

Cell = str | Text

_GAP = 2
_LEAST = 14
"""Minimum width of a column that may be cut."""


def shortened(text: str, width: int) -> str:
    """Cuts text in the middle to `width` cells of a terminal."""
    if cell_len(text) <= width:
        return text
    tail = (width - 1) // 2
    head = width - 1 - tail
    while cell_len(text[:head]) > width - 1 - tail:
        head -= 1
    while tail and cell_len(text[-tail:]) > (width - 1) // 2:
        tail -= 1
    return f"{text[:head]}…{text[len(text) - tail :]}"


class SafeConsole(Console):
    """Prints text as it is: no markup, and no control sequences."""

    def print(self, *objects: object, **named: object) -> None:
        """Prints as Rich does, without markup; a table that goes into a pipe is written as tab-separated lines."""
        if not self.is_terminal and len(objects) == 1 and isinstance(table := objects[0], Table):
            self.file.write("".join(f"{line}\n" for line in table.tabbed()))
            return
        # Clean first: Rich removes a few control characters itself, and with them the ends of escape sequences.
        safe = [clean(one) if isinstance(one, str) else one for one in objects]
        super().print(*safe, **{"markup": False, "highlight": False, "emoji": False, **named})  # type: ignore[arg-type]

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Cleans all output: everything printed passes here."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(clean(segment.text), segment.style)


class Table:
    """Rows of cells below headers, the most important column first.

    right: the headers of columns with numbers. keys: number of columns that are never left out. uncut: these are not
    shortened while others can be left out.
    """

    def __init__(
        self,
        *headers: str,
        right: Collection[str] = (),
        title: str = "",
        keys: int = 1,
        uncut: bool = False,
        header: bool = True,
    ) -> None:
        self._headers = headers
        self._right = [name in right for name in headers]
        self._rows: list[list[Cell]] = []
        self._title = title
        self._keys = keys
        self._uncut = uncut
        self._header = header

    def add_row(self, *cells: Cell) -> None:
        """Adds a row of plain text: nothing in it is interpreted."""
        self._rows.append([_plain(one) for one in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self._fitted(options.max_width)
        if self._title:
            yield Text(self._title, style="italic")
        if self._header:
            yield self._line([Text(name, style="bold") for name in self._headers], widths)
        for row in self._rows:
            yield self._line(row, widths)
        if left_out := [name for name in self._headers[len(widths) :] if name]:
            yield Text(f"not shown: {', '.join(left_out)} (`| cat` shows all)", style="dim", overflow="fold")

    def tabbed(self) -> Iterator[str]:
        """Yields all columns of all rows, uncut, with tabs between the cells."""
        rows = [list[Cell](self._headers), *self._rows] if self._header else self._rows
        for row in rows:
            yield "\t".join(_one_line(clean(str(one))) for one in row)

    def _fitted(self, width: int) -> list[int]:
        """Returns the widths of the columns that fit."""
        header: list[Cell] = list(self._headers) if self._header else [""] * len(self._headers)
        cells = [header, *self._rows]
        natural = [max(cell_len(str(row[place])) for row in cells) for place in range(len(self._headers))]
        least = [min(one, _LEAST) for one in natural]
        shown = len(natural)
        needed = [*natural[: self._keys], *least[self._keys :]] if self._uncut else least
        while shown > self._keys and sum(needed[:shown]) + _GAP * (shown - 1) > width:
            shown -= 1
        widths, spare = least[:shown], width - sum(least[:shown]) - _GAP * (shown - 1)
        for place in range(shown):  # the first columns get their natural width first
            more = max(0, min(spare, natural[place] - widths[place]))
            widths[place] += more
            spare -= more
        return widths

    def _line(self, row: list[Cell], widths: list[int]) -> Text:
        line = Text(no_wrap=True, overflow="crop")
        for place, width in enumerate(widths):
            cell = row[place]
            text = Text(shortened(str(cell), width), style=cell.style if isinstance(cell, Text) else "")
            spaces = " " * (width - cell_len(text.plain))
            last = place == len(widths) - 1
            line.append(" " * (_GAP if place else 0))
            line.append_text(Text(spaces) + text if self._right[place] else text + Text("" if last else spaces))
        return line


def _plain(cell: Cell) -> Cell:
    if isinstance(cell, Text):
        return Text(_one_line(clean(cell.plain)), cell.style)
    return _one_line(clean(cell))


def _one_line(text: str) -> str:
    return text.replace("\n", " ").replace("\t", " ")
