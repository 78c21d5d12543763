"""The steps by which our own launcher starts an environment: the specification that crun gets, in the order of doing.

First as root of this host: limits, and the file system out of its layers. From `born` on as root inside: what every
container sees, and what it gives up. launcher/main.c has the list of all steps.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from app.environments.oci import kernel, overlay
from app.environments.oci import specification as spec
from app.environments.oci.birth import NEEDED, Birth
from app.environments.oci.namespace import Stage
from app.environments.oci.system_layer import HOSTNAME
from app.environments.oci.users import SIZE, Users

Step = tuple[str, ...]

_FLAGS = {
    "ro": kernel.MS_RDONLY,
    "nosuid": kernel.MS_NOSUID,
    "nodev": kernel.MS_NODEV,
    "noexec": kernel.MS_NOEXEC,
    "strictatime": kernel.MS_STRICTATIME,
}
_DEVICES = ("null", "zero", "full", "tty", "random", "urandom")
_LINKS = {
    "dev/fd": "/proc/self/fd",
    "dev/stdin": "/proc/self/fd/0",
    "dev/stdout": "/proc/self/fd/1",
    "dev/stderr": "/proc/self/fd/2",
    "dev/core": "/proc/kcore",
    "dev/ptmx": "pts/ptmx",
}
"""As every runtime makes them."""

_KEPT = sum(1 << spec.CAPABILITY_BITS[name] for name in spec.CAPABILITIES)


def plan(birth: Birth, users: Users, stage: Stage) -> bytes:
    """What the launcher reads: every word ends with a zero. Raises: ValueError: a word has one inside."""
    read_only = birth.wish.read_only
    return b"".join(
        (
            _packed(_outside(birth, users, stage)),
            _packed(_mounts(spec.mounts(read_only=read_only))),
            _packed(_mounts(birth.cgroup.mounts())),
            _always(),
            _packed([("enter", str(int(read_only))), ("hostname", HOSTNAME)]),
            _packed(_become(birth)),
        )
    )


def _outside(birth: Birth, users: Users, stage: Stage) -> Iterator[Step]:
    yield "new", str(birth.place.upper)
    yield "new", str(birth.place.work)
    yield from birth.cgroup.orders(birth.wish.resources)
    for door in birth.cgroup.doors:
        yield "write", door, "0"
    yield ("mounts",)
    yield "translate", str(birth.layers[0].parent), str(stage.layers)
    yield "translate", str(birth.place.folder), str(stage.own)
    own = [stage.own / place.name for place in (birth.place.upper, birth.place.work)]
    options = overlay.options([stage.layers / layer.name for layer in birth.layers], *own)
    yield "overlay", str(stage.layers), str(stage.root), options
    yield "root", str(stage.root)
    if birth.wish.needs_shell:
        yield "need", NEEDED
    yield "folder", birth.wish.workdir, str(users.first)
    for tool in birth.wish.tools:
        yield "folder", tool.target, str(users.first)
        yield "show", str(tool.folder), tool.target
    for name, value in spec.limits().items():
        yield "limit", str(getattr(resource, name)), str(value)
    yield "write", "/proc/self/oom_score_adj", str(spec.OOM_SCORE)
    yield "born", str(users.first), str(SIZE), str(birth.place.pid)
    yield "own", str(stage.root)


@lru_cache(maxsize=1)
def _always() -> bytes:
    return _packed(_inside())


def _inside() -> Iterator[Step]:
    for name in _DEVICES:
        yield "device", f"/dev/{name}", f"dev/{name}"
    for path, target in _LINKS.items():
        yield "link", target, path
    for path in spec.MASKED:
        yield "hide", path
    for path in spec.READ_ONLY:
        yield "freeze", path
    for name, value in spec.SYSCTLS.items():
        yield "write", f"/proc/sys/{name.replace('.', '/')}", value
    yield ("loopback",)


def _become(birth: Birth) -> Iterator[Step]:
    variables = spec.variables(birth.env)
    for variable in variables:
        yield "variable", variable
    if not any(variable.startswith("HOME=") for variable in variables):
        yield ("home",)
    for word in spec.command():
        yield "argument", word
    yield "become", f"{_KEPT:x}"


def _mounts(mounts: Sequence[dict[str, Any]]) -> Iterator[Step]:
    """Those that are new are made read-only when all are there: one may have to make a folder in another."""
    protected = []
    for one in mounts:
        flags = sum(_FLAGS[name] for name in one["options"] if name in _FLAGS)
        if "bind" in one["options"]:
            yield "bind", one["source"], one["destination"], str(flags)
            continue
        words = ",".join(name for name in one["options"] if name not in _FLAGS)  # the file system's own
        yield "mount", one["type"], one["source"], one["destination"], str(flags & ~kernel.MS_RDONLY), words
        if flags & kernel.MS_RDONLY:
            protected.append(one["destination"])
    for place in protected:
        yield "protect", place


def _packed(steps: Iterable[Step]) -> bytes:
    words = [word for step in steps for word in step]
    for word in words:
        if "\0" in word:
            name = word.partition("=")[0]  # what follows may be a secret
            raise ValueError(f"expected names and values without zero bytes, found one in {name[:80]!r}")
    return os.fsencode("".join(f"{word}\0" for word in words))
