"""Scripts and styles of others are those that their projects published, each with its licence."""

from __future__ import annotations

import hashlib

from app.web.server import STATIC

_FOLDER = STATIC / "vendor"


def test_every_vendored_file_has_its_hash_and_its_licence() -> None:
    lines = (_FOLDER / "SHA256SUMS").read_text().splitlines()
    noted = {name: digest for digest, name in (line.split() for line in lines)}
    found = {file.name: file for file in _FOLDER.iterdir() if file.suffix in (".js", ".css")}
    assert {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in found.items()} == noted
    licences = {file.stem for file in _FOLDER.glob("*.LICENSE")} | {"hx-sse"}  # of htmx's own project
    assert {name.partition(".")[0] for name in found} <= licences
