"""Reads and writes samples as Parquet: one file for an attempt, any number of them as one batch."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any

import msgpack
import pyarrow
import pyarrow.parquet

from app.errors import SampleRefused
from app.experience.samples import Sample
from app.ledger.experience import EndedAttempt

_SPANS = pyarrow.list_(
    pyarrow.struct([("version", pyarrow.string()), ("start", pyarrow.int32()), ("end", pyarrow.int32())])
)
SCHEMA = pyarrow.schema(
    [
        ("run_id", pyarrow.string()),
        ("group_id", pyarrow.string()),
        ("task_id", pyarrow.string()),
        ("attempt_id", pyarrow.string()),
        ("task", pyarrow.string()),
        ("framework", pyarrow.string()),
        ("branch", pyarrow.int32()),
        ("kind", pyarrow.string()),
        ("part", pyarrow.int32()),
        ("token_ids", pyarrow.list_(pyarrow.int32())),
        ("mask", pyarrow.list_(pyarrow.bool_())),
        ("logprobs", pyarrow.list_(pyarrow.float32())),
        ("versions", _SPANS),
        ("temperature", pyarrow.float32()),
        ("models", pyarrow.list_(pyarrow.string())),
        ("reward", pyarrow.float64()),
        ("reward_parts", pyarrow.map_(pyarrow.string(), pyarrow.float64())),
        ("end_reason", pyarrow.string()),
    ]
)
"""The columns of a sample: docs/reference/experience.md."""
_FIELDS = tuple(one.name for one in fields(Sample))


def write(ended: EndedAttempt, samples: Iterable[Sample]) -> bytes:
    """Returns a file of one attempt's samples."""
    about = {
        **{name: str(getattr(ended, name)) for name in ("run_id", "group_id", "task_id", "attempt_id")},
        **{name: getattr(ended, name) for name in ("task", "reward", "end_reason")},
        "framework": ended.agent,
        "reward_parts": list(ended.reward_parts.items()),
    }
    # Not `asdict`, which copies token by token: that was most of the cost of making a sample.
    rows = [
        about | {name: getattr(sample, name) for name in _FIELDS} | {"versions": [asdict(v) for v in sample.versions]}
        for sample in samples
    ]
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=SCHEMA), buffer, compression="zstd")
    return buffer.getvalue()


def table_of(content: bytes) -> pyarrow.Table:
    """Reads a file of samples as a table. Raises: SampleRefused: it is no such file."""
    try:
        return pyarrow.parquet.read_table(io.BytesIO(content), schema=SCHEMA)
    except (pyarrow.ArrowException, ValueError, OSError) as error:
        raise SampleRefused(f"expected a Parquet file of samples; found: {error}") from error


def read(content: bytes) -> list[dict[str, Any]]:
    """Reads the rows of a file of samples, as `SCHEMA` names them. Raises: SampleRefused: it is no such file."""
    rows: list[dict[str, Any]] = table_of(content).to_pylist()
    return rows


def packed(content: bytes) -> bytes:
    """Returns the rows of a file of samples as one msgpack list of maps. Raises: SampleRefused."""
    data: bytes = msgpack.packb(read(content))
    return data


def joined(tables: Sequence[pyarrow.Table]) -> bytes:
    """Joins several files into one."""
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.concat_tables([SCHEMA.empty_table(), *tables]), buffer, compression="zstd")
    return buffer.getvalue()
