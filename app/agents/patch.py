"""Takes the agent's changes from the environment as a patch, and after each step for runs with `--record-diffs`.

Frameworks report patches too, but each of those can be empty or partial: MegaFlow's patch is the one that counts.
"""

from __future__ import annotations

import posixpath
import shlex
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson

from app.errors import AgentFailed, EnvironmentFailed
from app.models.shell import Shell

MAX_BYTES = 50 << 20
_TIMEOUT_S = 180.0
_NO_REPOSITORY, _TOO_LARGE = 40, 41

# Files that test runs leave behind do not belong to a patch.
_LEFT_OUT = ("**/__pycache__/**", "**/.pytest_cache/**", "**/*.pyc")
PATHS = " ".join(shlex.quote(path) for path in (".", *(f":(exclude,glob){pattern}" for pattern in _LEFT_OUT)))

# Everything uses a temporary index and object folder. So the agent's own stay unchanged, a lock left by a killed git
# does not matter, and a repository of another owner need not be writable. The temporary configuration replaces all
# others. The result is written to a file, because long command output loses its middle: a new file, as the agent may
# have made one of any name, and in another folder where this one is read-only. The copied index keeps its time: git
# uses it to find files that may have changed when the index was written, and reads those.
PREPARE = f"""
[ -e .git ] || exit {_NO_REPOSITORY}
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
printf '[safe]\\n\\tdirectory = *\\n[core]\\n\\tautocrlf = false\\n\\tquotePath = true\\n' >"$scratch/config"
unset GIT_DIR GIT_WORK_TREE GIT_EXTERNAL_DIFF GIT_DIFF_OPTS
export GIT_CONFIG_GLOBAL="$scratch/config" GIT_CONFIG_NOSYSTEM=1 GIT_OPTIONAL_LOCKS=0 LC_ALL=C
home=$(git rev-parse --git-path objects) || exit 1
index=$(git rev-parse --git-path index) || exit 1
case $home in /*) ;; *) home=$PWD/$home ;; esac
"""
_INDEX = """
mkdir "$scratch/objects" && export GIT_OBJECT_DIRECTORY="$scratch/objects" GIT_ALTERNATE_OBJECT_DIRECTORIES="$home"
base={base}
[ -n "$base" ] || base=$(git rev-parse --quiet --verify "HEAD^{{commit}}") || base=$(git hash-object -t tree /dev/null)
[ ! -e "$index" ] || {{ cp "$index" "$scratch/index" && touch -r "$index" "$scratch/index"; }}
export GIT_INDEX_FILE="$scratch/index"
"""
_TAKE = (
    _INDEX
    + """# Files that the agent told git to take for unchanged; those that a sparse checkout lacks stay as they are.
git ls-files -v | sed -n 's/^[a-z] //p' | git update-index --no-assume-unchanged --stdin || exit 1
git ls-files -v | sed -n 's/^[Ss] //p' | while IFS= read -r file; do [ ! -e "$file" ] || printf '%s\\n' "$file"; done \\
    | git update-index --no-skip-worktree --stdin || exit 1
git -c core.fsmonitor=false -c advice.addEmbeddedRepo=false add --all --ignore-errors -- {paths} 2>"$scratch/words" \\
    || cat "$scratch/words" >&2
git -c core.fsmonitor=false -c diff.noprefix=false -c diff.mnemonicPrefix=false diff --cached --binary --full-index \\
    --no-color --no-ext-diff --no-textconv --no-renames --src-prefix=a/ --dst-prefix=b/ "$base" -- {paths} \\
    >"$scratch/patch" || exit 1
[ "$(wc -c <"$scratch/patch")" -le {most} ] || exit {too_large}
kept=$(mktemp ./.megaflow-patch.XXXXXX 2>/dev/null || mktemp) && cp "$scratch/patch" "$kept" && printf %s "$kept"
"""
)


def head_commit(shell: Shell, workdir: str) -> str | None:
    """Returns the commit that `workdir` is at, or None where there is no repository or no commit yet.

    Called before the agent starts, it gives the base of the patch: an image may have a commit of its own on top of the
    one that the dataset names, and an agent may commit.
    """
    result = shell.run(
        PREPARE + 'git rev-parse --quiet --verify "HEAD^{commit}"', cwd=workdir, timeout_s=_TIMEOUT_S, stdin=b""
    )
    return result.stdout.decode().strip() or None if result.ok else None


def take_patch(shell: Shell, workdir: str, base_commit: str | None) -> bytes | None:
    """Returns the changes in `workdir` since `base_commit` (None: since its HEAD, if any), with new and binary files.

    None where `workdir` is not the root of a git repository; empty when nothing changed. Files that .gitignore names
    are left out, and so are files that test runs leave behind.

    Raises: AgentFailed: more than MAX_BYTES, or the repository was removed or git cannot read it any more.
    """
    take = _TAKE.format(
        paths=f"{PATHS} ':(exclude).megaflow-patch.*'",
        base=shlex.quote(base_commit or ""),
        most=MAX_BYTES,
        too_large=_TOO_LARGE,
    )
    result = shell.run(PREPARE + take, cwd=workdir, timeout_s=_TIMEOUT_S, stdin=b"")
    match result.exit_code:
        case 0:
            return _fetched(shell, workdir, result.stdout.decode("utf-8", "replace").strip())
        case code if code == _NO_REPOSITORY:
            if base_commit is None:
                return None
            raise AgentFailed(
                f"expected the git repository that {workdir} was when the agent began, found no .git there: what it"
                " changed cannot be told"
            )
        case code if code == _TOO_LARGE:
            raise _too_large(workdir)
    words = f"no end within {_TIMEOUT_S:g} s" if result.timed_out else result.text().strip()[-800:]
    raise AgentFailed(f"expected `git diff` against {base_commit or 'HEAD'} in {workdir} to work; found {words}")


def _fetched(shell: Shell, workdir: str, place: str) -> bytes:
    """Reads and removes the result's file. The agent may have replaced the programs that made it, and named it."""
    try:
        patch = shell.get(posixpath.join(workdir, place))
    except (FileNotFoundError, EnvironmentFailed, ValueError) as error:
        shell.run("true", timeout_s=_TIMEOUT_S)  # raises if the environment is gone
        raise AgentFailed(f"expected git to write a patch in {workdir}; found at {place[:200]!r}: {error}") from error
    if len(patch) > MAX_BYTES:
        raise _too_large(workdir)
    shell.run(f"rm -f {shlex.quote(place)}", cwd=workdir, timeout_s=_TIMEOUT_S)
    return patch


def _too_large(workdir: str) -> AgentFailed:
    return AgentFailed(f"expected a patch of at most {MAX_BYTES >> 20} MiB; found a larger one in {workdir}")


_MOST_BYTES = 128 << 10
"""Limit of one diff; the rest is cut."""
_TOTAL_BYTES = 8 << 20
"""Limit of all diffs of an attempt together; later diffs are not recorded."""
_DIFF_S = 10.0
_EVERY_S = 2.0

# Untracked files are registered without being read; those above 1 MiB are reported as binary.
_DIFF = (
    _INDEX
    + """git -c core.fsmonitor=false add --intent-to-add --ignore-errors -- {paths} 2>/dev/null
git -c core.fsmonitor=false -c core.bigFileThreshold=1m -c diff.noprefix=false -c diff.mnemonicPrefix=false diff \\
    --no-color --no-ext-diff --no-textconv --no-renames --ignore-submodules=all --src-prefix=a/ --dst-prefix=b/ \\
    "$base" -- {paths} 2>"$scratch/words" | head -c {most}
[ ! -s "$scratch/words" ] || {{ cat "$scratch/words" >&2; exit 1; }}
"""
)


class StepDiffs:
    """Diffs of one attempt, each taken when a command has ended, or after two seconds without one.

    The agent's index, objects and files stay unchanged. The cost of a diff is limited, and a failed diff does not end
    the attempt.
    """

    def __init__(self, shell: Shell, workdir: str, base_commit: str | None) -> None:
        self._scratch = f"/tmp/.megaflow-diff-{uuid.uuid4().hex[:12]}"  # inside; a killed diff leaves it behind
        make_scratch = f"{{ scratch={self._scratch}; rm -rf $scratch; mkdir -m 700 $scratch; }}"
        prepare = PREPARE.replace("scratch=$(mktemp -d)", make_scratch)
        base = shlex.quote(base_commit or "")
        self._command = prepare + _DIFF.format(base=base, paths=PATHS, most=_MOST_BYTES)
        self._shell, self._workdir = shell, workdir
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._lines: list[bytes] = []
        self._last, self._bytes = b"", 0
        self._took_s = self._at = 0.0

    def take(self) -> None:
        """Takes the current diff, unless that would cost too much. Raises nothing."""
        with self._lock:
            pause_s = self._took_s * 10 if self._took_s >= 1.0 else 0.0  # at most a tenth of the time
            if self._closing.is_set() or time.monotonic() - self._at < pause_s:
                return
            begun, at = time.monotonic(), time.time()
            try:
                result = self._shell.run(self._command, cwd=self._workdir, timeout_s=_DIFF_S, stdin=b"")
                if result.timed_out:
                    self._shell.run(f"rm -rf {self._scratch}", timeout_s=_DIFF_S)
            except Exception as error:  # noqa: BLE001  the attempt itself reports the end of the environment
                self._stop(f"{type(error).__name__}: {error}")
                return
            self._at = time.monotonic()
            self._took_s = self._at - begun
            if result.timed_out:
                self._note({"at": at, "missing": f"git took more than {_DIFF_S:g} s"})
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
        """During the block, also takes diffs while no command ends, and one last diff at the end."""
        watcher = threading.Thread(target=self._watch, name="step-diffs", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            self.take()
            self._closing.set()
            watcher.join(_DIFF_S)

    def _watch(self) -> None:
        while not self._closing.wait(_EVERY_S):
            if time.monotonic() - self._at >= _EVERY_S:
                self.take()

    def content(self) -> bytes:
        """Returns JSON lines: `at` (seconds since 1970) with a new `diff`, or with the reason in `missing`."""
        return b"".join(self._lines)
