"""`docker compose`, which two peers are made of: the CLI's own plugin, else Debian's, unpacked into the cache."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from bench.peers.installed import cache, run

_SUITE = "trixie"
"""The first Debian release that has the plugin (2.26); it is a static program and runs on older ones."""
_SOURCES = Path("/etc/apt")


def config_folder() -> str | None:
    """A value for DOCKER_CONFIG with which `docker compose` works; None: it does without.

    Raises: RuntimeError: there is none, and this is no Debian to get it from.
    """
    if _works(dict(os.environ)):
        return None
    folder = cache() / "compose"
    if not _works({**os.environ, "DOCKER_CONFIG": str(folder)}):
        _unpack(folder)
    if not _works({**os.environ, "DOCKER_CONFIG": str(folder)}):
        raise RuntimeError("`docker compose` does not answer, also not with Debian's plugin")
    return str(folder)


def _works(env: dict[str, str]) -> bool:
    command = ["docker", "compose", "version"]
    try:
        return subprocess.run(command, capture_output=True, check=False, env=env).returncode == 0  # noqa: S603
    except OSError:
        return False


def _unpack(folder: Path) -> None:
    """From the mirror that this machine's apt has."""
    work = cache() / "compose-apt"
    for name in ("lists/partial", "archives/partial"):
        (work / name).mkdir(parents=True, exist_ok=True)
    source = work / "sources.list"
    source.write_text(f"deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {_mirror()} {_SUITE} main\n")
    places = (f"Dir::Etc::sourcelist={source}", "Dir::Etc::sourceparts=/dev/null", f"Dir::State::lists={work}/lists")
    options = [word for place in (*places, f"Dir::Cache={work}", "APT::Sandbox::User=root") for word in ("-o", place)]
    run(["apt-get", *options, "update", "-qq"])
    run(["apt-get", *options, "download", "-qq", "docker-compose"], cwd=str(work))
    (package,) = work.glob("docker-compose_*.deb")
    run(["dpkg", "-x", str(package), str(work / "unpacked")])
    (folder / "cli-plugins").mkdir(parents=True, exist_ok=True)
    plugin = folder / "cli-plugins" / "docker-compose"
    plugin.unlink(missing_ok=True)
    plugin.symlink_to(work / "unpacked" / "usr/libexec/docker/cli-plugins/docker-compose")


def _mirror() -> str:
    files = [_SOURCES / "sources.list", *sorted((_SOURCES / "sources.list.d").glob("*"))]
    text = "\n".join(file.read_text() for file in files if file.is_file())
    found = re.search(r"^(?:URIs:\s*|deb\s+(?:\[[^]]*\]\s*)?)(\S+/debian/?)\s*(?:\s\S+.*)?$", text, re.MULTILINE)
    if found is None:
        raise RuntimeError("`docker compose` is missing, and apt here has no Debian mirror to get it from")
    return found.group(1)
