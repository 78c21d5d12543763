"""Long outputs kept whole on the worker: bounded, named, without secrets, never at the cost of the command."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import zstandard

from app.artifacts import open_store
from app.models.outcome import ArtifactKind
from app.workers.command_logs import CommandLogs
from app.workers.evidence import Evidence


def unpacked(content: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(zstandard.ZstdDecompressor().decompressobj().decompress(content))) as archive:
        return {entry.name: archive.extractfile(entry).read() for entry in archive}  # type: ignore[union-attr]


def stored(logs: CommandLogs, tmp_path: Path, *, redact: list[str] | None = None) -> dict[str, bytes]:
    """What is in the artifact."""
    evidence, store = Evidence(), open_store(f"file://{tmp_path}/store")
    evidence.command_logs(logs)
    found = {one.kind: one for one in evidence.store(store, "runs/r/t/1", redact=redact or [])}
    one = found[ArtifactKind.COMMAND_LOGS]
    assert one.key is not None, one.missing
    assert one.size_bytes == len(store.get(one.key))
    return unpacked(store.get(one.key))


def test_what_was_kept_is_an_artifact_with_an_index_and_without_secrets(tmp_path: Path) -> None:
    logs = CommandLogs(tmp_path / "logs", 1000)
    for stream, command, said in (
        ("stdout", "say it", b"the key mf-12345678 is"),
        ("stderr", "a\nmf-12345678", b" no"),
    ):
        log = logs.open(stream, command)
        log.write(said)
        log.close()
    assert stored(logs, tmp_path, redact=["mf-12345678"]) == {
        "index.txt": b"0001.stdout: 22 bytes; of: say it\n0002.stderr: 3 bytes; of: a\\n[redacted]*\n",
        "0001.stdout": b"the key [redacted]* is",
        "0002.stderr": b" no",
    }


def test_a_log_that_cannot_be_written_is_cut_and_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    log = CommandLogs(tmp_path / "logs", 1000).open("stdout", "x")
    log.write(b"lost")
    log.write(b"and this")
    log.close()
    assert "the first 0 bytes of it are 0001.stdout" in log.location(12)
    assert "could not be written" in log.location(12)
