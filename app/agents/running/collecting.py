"""Copies the files that a framework left to the worker: regular files only, up to a limit of bytes.

The model may have created anything there. A file of any name, depth or kind can at worst be left out. Only a lost
environment and a full disk raise errors.
"""

from __future__ import annotations

import errno
import io
import os
import shlex
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

import structlog

from app.errors import EnvironmentFailed
from app.models.shell import Shell

log = structlog.get_logger(__name__)

MOST_BYTES = 64 << 20
MOST_FILES = 20_000
DEEPEST = 64
"""The deepest level of folders that is collected: some tools fail on more."""
LEFT_OUT = "LEFT-OUT.txt"
"""File in the collected folder that only MegaFlow writes: lists the files that were too large, one per line."""
_LONGEST_PATH = 3500  # bytes, of a path on this host; the kernel's calls take at most 4096
_TIMEOUT_S = 120.0
_LOOK_S = 30.0
_NO_FOLDER = 3
_UNREADABLE = (OSError, ValueError, RecursionError, tarfile.TarError)
"""Errors that maliciously made names, sizes and archives can raise."""

# Folders that are too deep are removed, since archiving them may fail. Then the largest files, which are rarely worth
# reading; then smaller ones, until the rest fits.
_SHRINK = f"""\
cd "$1" || exit 3
command -v du >/dev/null && command -v find >/dev/null && command -v cut >/dev/null ||
    {{ echo "expected du, find and cut in the image"; exit 4; }}
rm -rf {LEFT_OUT}
chmod -R u+rwX . 2>/dev/null
find . -mindepth "$3" -maxdepth "$3" -type d -print -exec rm -rf {{}} + 2>/dev/null
find . ! -type d ! -type f -exec rm -f {{}} +
for kib in "$2" 16384 4096 1024 256 64 16 0; do
    find . -type f -size +"${{kib}}"k -print -exec rm -f {{}} +
    set -- "$1" "$2" $(du -sk . | cut -f1)
    [ "$3" -gt "$2" ] || exit 0
done
"""


def collect_inside(
    shell: Shell, home: str, into: Path, *, first: Sequence[str] = (), most_bytes: int = MOST_BYTES
) -> None:
    """Copies the files of the folder `home` inside to `into`, which is created; of too many, removes the largest.

    first: names of files that are fetched first, whatever else is there and whatever the image lacks.

    Links, sockets and the like are not collected, so no path in the result leads elsewhere. Too large files are deleted
    inside.

    Raises: EnvironmentFailed, or other shell errors when it is gone; OSError: this host's disk is full.
    """
    into.mkdir(parents=True, exist_ok=True)
    for name in first:
        _fetch(shell, home, name, into, most_bytes)
    result = shell.run(_shrinking(home, most_bytes), timeout_s=_TIMEOUT_S)
    if result.exit_code == _NO_FOLDER:  # the agent removed its own folder
        return
    if not _note_left_out(into, result.ok, result.stdout, result.stderr):
        return
    with _bring(shell, into, "not all was collected"):
        _unpack(shell.get_tree(home), into, most_bytes)


def _shrinking(home: str, most_bytes: int) -> str:
    return f"set -- {shlex.quote(home)} {most_bytes >> 10} {DEEPEST}\n{_SHRINK}"


def _note_left_out(folder: Path, ok: bool, listing: bytes, errors: bytes) -> bool:
    """Notes what `_SHRINK` removed, or why it did not get to its end. Returns whether it did."""
    removed = listing.decode("utf-8", "replace")
    if not ok:
        why = (removed + errors.decode("utf-8", "replace")).strip()[:500]
        _note(folder, f"nothing more was collected: {why or 'it took too long'}\n")
    elif removed:
        _note(folder, removed)
    return ok


@contextmanager
def _bring(shell: Shell, into: Path, words: str) -> Iterator[None]:
    """Notes errors of the block, after `words`. Raises: errors of a lost environment; OSError: the disk is full."""
    try:
        yield
    except FileNotFoundError:
        return
    except (EnvironmentFailed, *_UNREADABLE) as error:
        _raise_if_full(error)
        shell.run("true", timeout_s=_LOOK_S)  # raises if the environment is gone
        _note(into, f"{words}: {error}\n")


def _fetch(shell: Shell, home: str, name: str, into: Path, most_bytes: int) -> None:
    """Copies one file by name, if it is a regular file and no link."""
    place = shlex.quote(f"{home}/{name}")
    if not shell.run(f"[ -f {place} ] && [ ! -h {place} ]", timeout_s=_LOOK_S).ok:
        return
    with _bring(shell, into, name):
        content = shell.get(f"{home}/{name}")
        if len(content) > most_bytes:
            raise ValueError("too large")
        _write(into / name, content)


def _unpack(archive: bytes, into: Path, most_bytes: int) -> None:
    """Unpacks only regular files, and only below `into`: the archive comes from inside and is not trusted."""
    files = size = 0
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
        for member in tar:
            name = PurePosixPath(member.name)
            if not member.isreg() or name.is_absolute() or ".." in name.parts or not name.parts:
                continue
            files, size = files + 1, size + member.size
            if files > MOST_FILES or size > 2 * most_bytes:
                _note(into, f"{member.name} and what follows: too much\n")
                return
            if name.parts[0] == LEFT_OUT or len(name.parts) > DEEPEST:
                _note(into, f"{member.name[:500]}: {'the name is ours' if name.parts[0] == LEFT_OUT else 'too deep'}\n")
                continue
            try:
                source = tar.extractfile(member)
                _write(into / name, source.read() if source else b"")
            except _UNREADABLE as error:  # the name is too long, or a folder has it
                _raise_if_full(error)
                _note(into, f"{member.name[:500]}: {error.strerror if isinstance(error, OSError) else error}\n")


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    file.chmod(0o600)


def tidy(home: Path, *, most_bytes: int = MOST_BYTES) -> None:
    """Does the same for a folder on this host: removes all but regular files, then the largest until the rest fits.

    Raises: OSError: the disk is full.
    """
    try:
        if home.is_symlink() or not home.is_dir():
            home.unlink(missing_ok=True)
            home.mkdir()
        home.chmod(0o700)
        script = ["/bin/sh", "-c", _shrinking(str(home), most_bytes)]
        done = subprocess.run(script, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S)  # noqa: S603
        removed = _remove_surplus(home)
    except (OSError, RecursionError, subprocess.TimeoutExpired) as error:
        _raise_if_full(error)
        log.warning("agent.home_not_tidied", folder=str(home), reason=str(error))
        return
    _note_left_out(home, done.returncode == 0, done.stdout, done.stderr)
    if removed:
        _note(home, f"{removed} files and folders: too many, or a path of more than {_LONGEST_PATH} bytes\n")


def _remove_surplus(home: Path) -> int:
    """Removes files and folders beyond `MOST_FILES` in number or `_LONGEST_PATH` in length. Returns how many."""
    found = removed = 0
    for folder, folders, names, descriptor in os.fwalk(home, topdown=False):
        for remove, several in ((os.unlink, names), (os.rmdir, folders)):
            for name in several:
                found += 1
                if found > MOST_FILES or len(os.fsencode(f"{folder}/{name}")) > _LONGEST_PATH:
                    with suppress(OSError):  # a folder that holds earlier files stays
                        remove(name, dir_fd=descriptor)
                        removed += 1
    return removed


def _raise_if_full(error: Exception) -> None:
    """Raises: OSError: this host's disk is full, which is reported as such."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise error


def _note(folder: Path, text: str) -> None:
    text = text.encode("utf-8", "replace").decode()  # a name may be any bytes
    log.info("agent.files_left_out", folder=str(folder), files=text[:500])
    try:
        with (folder / LEFT_OUT).open("a", encoding="utf-8") as note:
            note.write(text)
    except OSError as error:
        _raise_if_full(error)
        log.warning("agent.note_not_written", folder=str(folder), reason=str(error))
