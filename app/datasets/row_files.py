"""Reads the rows of files one after the other: parquet, JSON lines, a JSON list.

Only a JSON list is held in memory as a whole. A line that is no JSON is a fault of its row; reading continues.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.datasets.faults import FaultPlace, shown
from app.errors import DatasetInvalid, DependencyMissing

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

ENDINGS = (".parquet", ".jsonl", ".json")
_MOST_LINE_BYTES = 256 << 20
"""Limit of one row. Rows of Multi-SWE-RL contain three whole test reports."""
_MOST_LIST_BYTES = 1 << 30
"""Limit of a JSON list, which is read as a whole."""
_PARQUET_ROWS = 64
"""Number of rows read at a time."""


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row of a file by its number, from 1: its values, or the fault that prevents them."""

    file: Path
    number: int
    values: dict[str, Any]
    fault: DatasetInvalid | None = None

    @property
    def place(self) -> FaultPlace:
        """The row for error messages: `FILE, row 3 (django__django-13251)`."""
        name = self.values.get("instance_id")
        if not isinstance(name, str):
            return FaultPlace(f"{self.file}, row {self.number}")
        label = name if name.isprintable() and len(name) <= 200 else shown(name)
        return FaultPlace(f"{self.file}, row {self.number} ({label})")


def rows(file: Path, *, chosen: Container[int] | None = None, columns: Sequence[str] = ()) -> Iterator[RawRow]:
    """Yields the rows in order. chosen: numbers of rows, others are skipped; columns: parquet reads only these.

    Raises: DatasetInvalid: its content does not match its file ending; DependencyMissing.
    """
    reader = {".parquet": _of_parquet, ".jsonl": _of_lines, ".json": _of_list}[file.suffix]
    try:
        yield from reader(file, chosen, columns)
    except OSError as error:
        raise DatasetInvalid(f"{file}: expected a readable file; found {error}") from error


def columns_of(file: Path) -> list[str]:
    """Returns names of the columns: of a parquet file all, otherwise of the first row. Raises: as `rows`."""
    if file.suffix == ".parquet":
        with _parquet(file) as opened:
            return [str(name) for name in opened.schema_arrow.names]
    first = next(rows(file), None)
    return [] if first is None else list(first.values)


def digest_of(files: Sequence[Path]) -> str:
    """Returns the sha256 of the files' contents, in their order; their names do not count. Raises: OSError."""
    whole = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            whole.update(hashlib.file_digest(opened, "sha256").digest())
    return whole.hexdigest()


def _of_lines(file: Path, chosen: Container[int] | None, _columns: Sequence[str]) -> Iterator[RawRow]:
    number = 0
    with file.open("rb") as opened:
        while line := opened.readline(_MOST_LINE_BYTES):
            number += 1
            if len(line) == _MOST_LINE_BYTES:
                raise DatasetInvalid(f"{file}, row {number}: expected less than {_MOST_LINE_BYTES} bytes; found more")
            if (chosen is None or number in chosen) and not line.isspace():
                yield _parsed(file, number, line)


def _parsed(file: Path, number: int, line: bytes) -> RawRow:
    try:
        return _row(file, number, _value(line))
    except json.JSONDecodeError as error:
        begins = shown(line[:200].decode(errors="replace").rstrip("\r\n"))
        why = f"{begins} on line {number} ({error.msg}, character {error.pos + 1})"
        return _broken(file, number, f"expected JSON; found {why}")
    except ValueError as error:
        return _broken(file, number, f"expected JSON{_in_utf_8(error)}; found {error}")


def _of_list(file: Path, chosen: Container[int] | None, _columns: Sequence[str]) -> Iterator[RawRow]:
    entries = json_of(file)
    if not isinstance(entries, list):
        raise DatasetInvalid(
            f"{file}: expected a JSON list of rows; found {shown(entries)}; one row a line goes by .jsonl"
        )
    for number, row in enumerate(entries, start=1):
        if chosen is None or number in chosen:
            yield _row(file, number, row)


def json_of(file: Path) -> Any:
    """Returns the JSON value of a file that is read as a whole. Raises: DatasetInvalid; OSError."""
    if file.stat().st_size > _MOST_LIST_BYTES:
        raise DatasetInvalid(f"{file}: expected at most {_MOST_LIST_BYTES} bytes; found more; write it as .jsonl")
    try:
        return _value(file.read_bytes())
    except ValueError as error:
        raise DatasetInvalid(f"{file}: expected JSON{_in_utf_8(error)}; found {error}") from error


def _value(text: bytes) -> Any:
    """Parses the text, after a byte-order mark if there is one. Raises: ValueError."""
    try:
        return json.loads(text.decode("utf-8-sig"), parse_constant=_no_number, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("lists or objects nested too deep to be read") from None


def _in_utf_8(error: ValueError) -> str:
    return " in UTF-8" if isinstance(error, UnicodeDecodeError) else ""


def _no_number(word: str) -> Any:
    raise ValueError(f"{word}, which JSON has no word for")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds an object without duplicate keys: of two equal keys, JSON readers use one or the other."""
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r:.80} twice in one object")
    return values


def _row(file: Path, number: int, found: Any) -> RawRow:
    if isinstance(found, dict):
        return RawRow(file, number, found)
    return _broken(file, number, f"expected a JSON object; found {shown(found)}")


def _broken(file: Path, number: int, why: str) -> RawRow:
    return RawRow(file, number, {}, FaultPlace(f"{file}, row {number}").said(why))


def _parquet(file: Path) -> ParquetFile:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError as error:
        raise DependencyMissing(
            f"{file}: expected the package pyarrow, which reads parquet, found none;"
            " try `pip install 'megaflow[datasets]'`"
        ) from error
    try:
        return ParquetFile(file)
    except (ArrowException, OSError) as error:
        raise DatasetInvalid(f"{file}: expected a parquet file; found {error}") from error


def _of_parquet(file: Path, chosen: Container[int] | None, columns: Sequence[str]) -> Iterator[RawRow]:
    from pyarrow import ArrowException

    with _parquet(file) as opened:
        names = [name for name in columns if name in opened.schema_arrow.names] if columns else None
        number = 0
        try:
            for batch in opened.iter_batches(batch_size=_PARQUET_ROWS, columns=names):
                numbers = [number + 1 + place for place in range(batch.num_rows)]
                number += batch.num_rows
                places = [place for place, one in enumerate(numbers) if chosen is None or one in chosen]
                if places:
                    selected_rows = batch if len(places) == batch.num_rows else batch.take(places)
                    for place, values in zip(places, selected_rows.to_pylist(), strict=True):
                        yield RawRow(file, numbers[place], _plain(values))
        except (ArrowException, OSError, ValueError) as error:
            raise DatasetInvalid(f"{file}, after row {number}: expected parquet; found {error}") from error


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: one.isoformat() if isinstance(one, datetime | date) else one for name, one in values.items()}
