"""Records the repository's diff after each step of an agent, for runs that ask for it (`--record-diffs`).

Taken when a command of the agent has ended, and every two seconds while an agent acts inside by itself. The agent's
index, objects and files stay as they are; what a diff may cost is bounded, and one that cannot be had ends none.
"""

from __future__ import annotations

import shlex
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson

from app.agents.patch import PATHS, PREPARE
from app.models.shell import Shell

_MOST_BYTES = 128 << 10
"""Of one diff; more is left out."""
_TOTAL_BYTES = 8 << 20
"""Of all diffs of an attempt; nothing is recorded beyond."""
_TIMEOUT_S = 10.0
_EVERY_S = 2.0

# Files that git does not know yet are noted without being read; those above a mebibyte are told as binary ones.
_DIFF = """
mkdir "$scratch/objects" && export GIT_OBJECT_DIRECTORY="$scratch/objects" GIT_ALTERNATE_OBJECT_DIRECTORIES="$home"
base={base}
[ -n "$base" ] || base=$(git rev-parse --quiet --verify "HEAD^{{commit}}") || base=$(git hash-object -t tree /dev/null)
[ ! -e "$index" ] || {{ cp "$index" "$scratch/index" && touch -r "$index" "$scratch/index"; }}
export GIT_INDEX_FILE="$scratch/index"
git -c core.fsmonitor=false add --intent-to-add --ignore-errors -- {paths} 2>/dev/null
git -c core.fsmonitor=false -c core.bigFileThreshold=1m -c diff.noprefix=false -c diff.mnemonicPrefix=false diff \\
    --no-color --no-ext-diff --no-textconv --no-renames --ignore-submodules=all --src-prefix=a/ --dst-prefix=b/ \\
    "$base" -- {paths} 2>"$scratch/words" | head -c {most}
[ ! -s "$scratch/words" ] || {{ cat "$scratch/words" >&2; exit 1; }}
"""


class StepDiffs:
    """The diffs of one attempt. Safe for many threads."""

    def __init__(self, shell: Shell, workdir: str, base_commit: str | None) -> None:
        self._scratch = f"/tmp/.megaflow-diff-{uuid.uuid4().hex[:12]}"  # inside; killed, it leaves it to be removed
        made = f"{{ scratch={self._scratch}; rm -rf $scratch; mkdir -m 700 $scratch; }}"
        prepare = PREPARE.replace("scratch=$(mktemp -d)", made)
        base = shlex.quote(base_commit or "")
        self._command = prepare + _DIFF.format(base=base, paths=PATHS, most=_MOST_BYTES)
        self._shell, self._workdir = shell, workdir
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._lines: list[bytes] = []
        self._last, self._bytes = b"", 0
        self._took_s = self._at = 0.0

    def take(self) -> None:
        """Take the diff as it is now, unless that would cost too much. Raises nothing."""
        with self._lock:
            pause_s = self._took_s * 10 if self._took_s >= 1.0 else 0.0  # so that it takes a tenth of the time
            if self._closing.is_set() or time.monotonic() - self._at < pause_s:
                return
            begun, at = time.monotonic(), time.time()
            try:
                result = self._shell.run(self._command, cwd=self._workdir, timeout_s=_TIMEOUT_S, stdin=b"")
                if result.timed_out:
                    self._shell.run(f"rm -rf {self._scratch}", timeout_s=_TIMEOUT_S)
            except Exception as error:  # noqa: BLE001  the environment's end is the attempt's to tell
                self._stop(f"{type(error).__name__}: {error}")
                return
            self._at = time.monotonic()
            self._took_s = self._at - begun
            if result.timed_out:
                self._note({"at": at, "missing": f"git took more than {_TIMEOUT_S:g} s"})
            elif not result.ok:
                self._stop(result.stderr.decode(errors="replace").strip()[-500:] or "no repository is there")
            elif result.stdout != self._last:
                self._last = result.stdout
                cut = len(result.stdout) >= _MOST_BYTES
                self._note({"at": at, "diff": result.stdout.decode(errors="replace"), "cut": cut})

    def _note(self, line: dict[str, Any]) -> None:
        packed = orjson.dumps(line) + b"\n"
        self._bytes += len(packed)
        if self._bytes > _TOTAL_BYTES:
            self._stop(f"the diffs of this attempt are more than {_TOTAL_BYTES >> 20} MiB")
        else:
            self._lines.append(packed)

    def _stop(self, why: str) -> None:
        self._closing.set()
        self._lines.append(orjson.dumps({"at": time.time(), "missing": why}) + b"\n")

    @contextmanager
    def recording(self) -> Iterator[None]:
        """For the block, take it also while no command ends; once more at the end."""
        watcher = threading.Thread(target=self._watch, name="step-diffs", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            self.take()
            self._closing.set()
            watcher.join(_TIMEOUT_S)

    def _watch(self) -> None:
        while not self._closing.wait(_EVERY_S):
            if time.monotonic() - self._at >= _EVERY_S:
                self.take()

    def content(self) -> bytes:
        """JSON lines: `at` (seconds since 1970) with a new `diff`, or why it is missing."""
        return b"".join(self._lines)
