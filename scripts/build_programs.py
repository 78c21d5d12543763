"""Builds the programs of app/environments/prebuilt: `make helper`, on x86-64 with Debian's compilers.

python scripts/build_programs.py [FOLDER]   FOLDER: write there instead, to compare
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

from app.environments.prebuilt import BUILT, HERE, SOURCES, source_digest

FLAGS = ("-std=c11", "-static", "-O2", "-Wall", "-Wextra", "-s", "-Wl,--build-id=none")
HEADERS = ("-idirafter", "/usr/include", "-idirafter", "/usr/include/x86_64-linux-gnu")  # of the kernel; musl has none
COMPILERS = {"x86_64": ("musl-gcc", *FLAGS, *HEADERS), "aarch64": ("aarch64-linux-gnu-gcc", *FLAGS)}
PACKAGES = "gcc musl-tools gcc-aarch64-linux-gnu libc6-dev-arm64-cross"


def missing() -> list[str]:
    """Compilers that this host has not got."""
    return [command[0] for command in COMPILERS.values() if shutil.which(command[0]) is None]


def version(compiler: str) -> str:
    """The first line that the compiler says of itself."""
    told = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True)  # noqa: S603 (ours)
    return told.stdout.splitlines()[0]


def build(folder: Path) -> None:
    """Write all programs and built.json into `folder`. Raises: CalledProcessError: a compiler refused."""
    programs = {}
    for program, sources in SOURCES.items():
        files = sorted(str(file.relative_to(sources)) for file in sources.glob("*.c"))
        for machine, command in COMPILERS.items():
            made = folder / f"{program}-{machine}"
            subprocess.run([*command, "-o", str(made), *files], check=True, cwd=sources)  # noqa: S603 (ours)
            made.chmod(0o755)
            digest = hashlib.sha256(made.read_bytes()).hexdigest()
            programs[made.name] = {"sha256": digest, "compiler": version(command[0])}
    about = {"sources": {program: source_digest(program) for program in SOURCES}, "programs": programs}
    (folder / BUILT.name).write_text(json.dumps(about, indent=2) + "\n")


def main() -> int:
    if absent := missing():
        print(f"expected {', '.join(absent)}; install Debian's {PACKAGES}", file=sys.stderr)
        return 69
    folder = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else HERE
    build(folder)
    for made in sorted(folder.glob("*-*")):
        print(f"{made}: {made.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
