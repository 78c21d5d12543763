"""Compares the state of a used environment with its state before: processes, mounts, users, settings.

A driver proves by its own means that it has restored an environment (an emptied layer, a new cgroup). This module
checks from inside, in the same way for every kind, so that a driver's mistake shows: it checks processes, sockets,
mounts, files in memory, variables, identity and limits, queues between processes, and the few files by which one task
may influence the next (users, name resolution, profiles, cron, history, git). The layer's proof covers all other files.

It runs one command of the shell's own words (`head`, if present, saves time): the image needs nothing else.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from app.errors import EnvironmentFailed
from app.models.shell import Shell

_TIMEOUT_S = 20.0
_MANY = 200
"""Maximum names of a folder that are listed; of a larger folder only the count."""
_LINES = 100_000
"""Maximum lines read of a file; none of these files has more."""

_FILES = (
    *("/etc/passwd", "/etc/group", "/etc/shadow", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf"),
    *("/etc/environment", "/etc/profile", "/etc/ld.so.preload", "/etc/crontab", "/etc/gitconfig"),
    *("~/.profile", "~/.bashrc", "~/.bash_profile", "~/.gitconfig", "~/.config/git/config"),
    *(".git/HEAD", ".git/config", ".git/info/exclude", ".git/refs/stash"),
    "/proc/sys/kernel/hostname",
)
"""Files that are read whole. Relative paths: in the working folder."""
_FOLDERS = (
    *("/", "/dev", "/dev/shm", "/dev/mqueue", "/run", "/tmp", "/var/tmp"),
    *("/etc/profile.d", "/etc/cron.d", "/var/spool/cron", "/var/spool/cron/crontabs", "/var/spool/cron/atjobs"),
    *("~", ".git/hooks", "/usr/local/bin"),
)
"""Folders whose names are listed, hidden names too."""
_STATUS = ("Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
_CONFINED = ("NoNewPrivs", "Seccomp", "Cpus_allowed", "Mems_allowed")
_TABLES = (
    *("/proc/self/mountinfo", "/proc/self/status", "/proc/self/limits", "/proc/self/stat", "/proc/self/oom_score_adj"),
    *(f"/proc/sysvipc/{name}" for name in ("shm", "msg", "sem")),
    "/proc/net/unix",
)
_SOCKETS = tuple(f"/proc/net/{name}" for name in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"))
"""Tables read only if there are sockets: for two, the kernel walks through the whole host's sockets (6 ms each)."""
_ENGINES_RESOLVER = "0B00007F"
"""127.0.0.11, as the kernel writes it. On a network of its own the engine answers there, at new ports each time."""
_NAMESPACES = ("mnt", "net", "ipc", "uts", "pid", "user")

# The asking shell is recognized by its parents, the session's helper by its program. `head` separates many files;
# without it, the shell reads them itself, byte by byte.
_SCRIPT = f"""\
r() {{ for f; do printf '==> %s <==\\n' "$f"
while IFS= read -r l || [ -n "$l" ]; do printf '%s\\n' "$l"; l=; done <"$f"; done; }}
d() {{ [ -d "$1" ] || return 0; k=$1; cd "$1" 2>/dev/null || return 0
set -- .[!.]* ..?* *; printf 'c:%s %s\\n' "$k" $#; [ $# -gt {_MANY} ] || for e; do
if [ -L "$e" ]; then printf 'd:%s %s@\\n' "$k" "$e"; elif [ -e "$e" ]; then printf 'd:%s %s\\n' "$k" "$e"; fi
done; cd "$w" || exit 1; }}
w=$PWD; printf 'w %s\\n' "$w"
for t in {" ".join(_FOLDERS)}; do d "$t"; done
for t in {" ".join(_NAMESPACES)}; do [ "/proc/$$/ns/$t" -ef "/proc/1/ns/$t" ] && printf 'n %s\\n' "$t"; done
p=$$; own=' '; while [ "$p" -gt 1 ]; do own="$own$p "; up=
while read -r k v; do case $k in PPid:) up=$v; break;; esac; done <"/proc/$p/status"
p=$up; done 2>/dev/null
set --; for q in /proc/[0-9]*; do case $own in *" ${{q#/proc/}} "*) continue;; esac
[ "$q" = /proc/1 ] || {{ [ "$q/exe" -ef /proc/1/exe ] && continue; }}
set -- "$@" "$q/comm"; done
for t in {" ".join(_FILES)}; do [ -f "$t" ] && [ -r "$t" ] && set -- "$@" "$t"; done
any=; for t in /proc/net/sockstat /proc/net/sockstat6; do [ -f "$t" ] || {{ any=1; continue; }}
while read -r k a n x; do case $a$n in inuse0) ;; inuse*) any=1;; esac; done <"$t"; done
for t in {" ".join(_TABLES)} ${{any:+{" ".join(_SOCKETS)}}}; do [ -f "$t" ] && set -- "$@" "$t"; done
if command -v head >/dev/null; then head -n {_LINES} "$@"; else r "$@"; fi 2>/dev/null
printf '\\n==> exports <==\\n'; export -p
"""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """State of an environment at one moment: for each kind of state its items, and how often each occurs."""

    state: Mapping[str, Counter[str]]

    @classmethod
    def take(cls, shell: Shell) -> Fingerprint:
        """Reads the state, in one command; values of variables as digests. Raises: EnvironmentFailed."""
        result = shell.run(_SCRIPT.replace("~", "$HOME"), timeout_s=_TIMEOUT_S)
        if not result.ok or result.truncated:
            why = (
                "too much was found" if result.truncated else f"exit code {result.exit_code}, {result.stderr[-300:]!r}"
            )
            raise EnvironmentFailed(f"expected the state of the environment, found none ({why}); replace it.")
        return cls(_parsed(result.stdout.decode("utf-8", "surrogateescape")))


def differences(before: Fingerprint, after: Fingerprint) -> tuple[str, ...]:
    """Returns what came, went or changed, a line each, without values of variables or contents of files."""
    lines = []
    for kind in sorted(before.state.keys() | after.state.keys()):
        was, now = (one.state.get(kind, Counter()) for one in (before, after))
        came, went = ({_output(item) for item in more} for more in (now - was, was - now))
        for how, items in (("came", came - went), ("changed", came & went), ("went", went - came)):
            lines += [f"{kind}: {item} {how}" for item in sorted(items)]
    return tuple(lines)


def _output(item: str) -> str:
    return item.partition("\0")[0].encode("utf-8", "backslashreplace").decode()


_HEAD = re.compile(r"^==> (.+) <==\n", re.MULTILINE)


def _parsed(text: str) -> dict[str, Counter[str]]:
    first, *rest = _HEAD.split(text)
    state: dict[str, Counter[str]] = {}
    for line in first.splitlines():
        section, _, value = line.partition(" ")
        kind, read = _SECTIONS.get(section.partition(":")[0], ("unreadable lines", _whole))
        state.setdefault(kind, Counter()).update(read(section.partition(":")[2], value))
    for name, content in zip(rest[::2], rest[1::2], strict=True):
        kind, items = _of_file(name, content)
        state.setdefault(kind, Counter()).update(items)
    return state


def _of_file(name: str, content: str) -> tuple[str, Iterable[str]]:
    folder, _, last = name.rpartition("/")
    lines = content.splitlines()
    if name == "exports":
        return "environment variables", _variables(content)
    if last == "comm" and folder.startswith("/proc/"):
        return "processes", [content.strip()]
    if folder in ("/proc/net", "/proc/sysvipc", "/proc/self"):
        kind, read = _KERNEL.get(last) or _KERNEL[folder]
        return kind, [item for line in lines for item in read(last, line)]
    return "steering files", [f"{name}\0{_digest(content.strip())}"]


def _whole(name: str, line: str) -> Iterable[str]:
    return [f"{name} {line}".strip()] if line else []


def _socket(table: str, line: str) -> Iterable[str]:
    """Returns sockets that listen or need no peer; of unix sockets those with a name."""
    words = line.split()
    if table == "unix":
        return [f"unix {words[7]}"] if len(words) > 7 and words[0].endswith(":") else []
    if len(words) < 4 or not words[0].endswith(":"):  # the table's header
        return []
    address, _, port = words[1].partition(":")
    port = "any port" if address == _ENGINES_RESOLVER else port  # items are counted, so one more of them shows
    return [f"{table} {address}:{port}"] if words[3] == "0A" or not table.startswith("tcp") else []


def _queue(kind: str, line: str) -> Iterable[str]:
    words = line.split()
    return [f"{kind} {words[0]}"] if words and words[0] != "key" else []


def _mount(_: str, line: str) -> Iterable[str]:
    """Returns target, options and type of a mount; not device numbers, which differ after each start."""
    words = line.split()
    return [f"{words[4]} {words[5]} {words[words.index('-') + 1]}"] if "-" in words else []


def _status(_: str, line: str) -> Iterable[str]:
    name, _, value = line.partition(":")
    return [f"{name} {value.strip()}"] if name in (*_STATUS, *_CONFINED) else []


def _limit(_: str, line: str) -> Iterable[str]:
    return [" ".join(line.split())] if line.startswith("Max ") else []


def _nice(_: str, line: str) -> Iterable[str]:
    words = line.rpartition(")")[2].split()
    return [f"nice {words[16]}"] if len(words) > 16 else []


def _named(folder: str, name: str) -> Iterable[str]:
    return [f"{folder}/{name}".replace("//", "/")]


def _counted(folder: str, count: str) -> Iterable[str]:
    return [f"{folder}: {count} entries"] if count.isdigit() and int(count) > _MANY else []


_Read = Callable[[str, str], Iterable[str]]
_SECTIONS: dict[str, tuple[str, _Read]] = {
    "w": ("working folder", _whole),
    "n": ("namespaces of the first process", _whole),
    "d": ("names", _named),
    "c": ("names", _counted),
}
_KERNEL: dict[str, tuple[str, _Read]] = {
    "/proc/net": ("sockets", _socket),
    "/proc/sysvipc": ("System V queues", _queue),
    "mountinfo": ("mounts", _mount),
    "status": ("identity", _status),
    "limits": ("limits", _limit),
    "stat": ("priority", _nice),
    "oom_score_adj": ("priority", _whole),
}

_VARIABLE = re.compile(r"^(?:export|declare -x) ([A-Za-z_][A-Za-z0-9_]*)", re.MULTILINE)
_OF_THE_COMMAND = {"PWD", "OLDPWD", "SHLVL", "_"}


def _variables(exported: str) -> Iterable[str]:
    """Yields name and digest of each variable. A value that looks like an export only adds a name, always the same."""
    matches = list(_VARIABLE.finditer(exported))
    ends = [*(one.start() for one in matches[1:]), len(exported)]
    for one, end in zip(matches, ends, strict=True):
        if one.group(1) not in _OF_THE_COMMAND:
            yield f"{one.group(1)}\0{_digest(exported[one.end() : end].strip())}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]
