"""One small repository with a bug, for all datasets; and the images that hold it, on the project's base image.

The base has Python, pytest and git, and the images are built without a network. So a few programs stand in: `pip`
(it copies a package), `make`, `cargo`, `autoreconf` (they "compile" by copying `src` to `build`), conda's `activate`.
What a dataset's image brings itself, such as the run scripts of Multi-SWE-bench, is the dataset's own.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import docker
from docker.errors import ImageNotFound

Found = TypeVar("Found")
BUG, FIX, MISTAKE = "sum(items[:-1])", "sum(items)", "sum(items[1:])"
SENTENCE = "In src/shop/cart.py, total() forgets the last item of the cart."
"""In every task's statement: the replayed model knows the tasks by it."""
SCRIPT = r"""match: total() forgets the last item of the cart
turns:
  - thought: Let me look
    command: cat src/shop/cart.py
  - thought: The slice leaves the last item out
    command: sed -i 's/items.:-1./items/' src/shop/cart.py && cat src/shop/cart.py
  - thought: Done
    submit: true
"""
"""What the replayed model does on each of them."""

KEPT, FIXED = ("test_empty", "test_count"), "test_last_item"
TEST_FILE = "tests/test_cart.py"
_CART = '''"""A cart of prices."""


def total(items):
    """What they cost together."""
    return {body}


def count(items):
    """How many there are."""
    return len(items)
'''
_TESTS = """from shop.cart import count, total


def test_empty():
    assert total([]) == 0


def test_count():
    assert count([1, 2]) == 2
"""
_HIDDEN = """

def test_last_item():
    assert total([1, 2, 3]) == 6
"""
# As a test tool of another language: on what was built, one line a test.
_CHECK = """import importlib.util, sys
sys.path.insert(0, "build")
sys.dont_write_bytecode = True
STYLES = {
    "automake": ("PASS: {}", "FAIL: {}"),
    "redis": ("[ok]: {} (1 ms)", "[err]: {} in tests/test_cart.py"),
    "cargo": ("test {} ... ok", "test {} ... FAILED"),
}
passed, failed = STYLES[sys.argv[1]]
spec = importlib.util.spec_from_file_location("test_cart", "tests/test_cart.py")
tests = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tests)
code = 0
for name in [name for name in vars(tests) if name.startswith("test_")]:
    try:
        getattr(tests, name)()
    except AssertionError:
        code = 1
        print(failed.format(name))
    else:
        print(passed.format(name))
sys.exit(code)
"""
FILES: Mapping[str, str] = {
    ".gitignore": "build/\n__pycache__/\n",
    "src/shop/__init__.py": "",
    "src/shop/cart.py": _CART.format(body=BUG),
    TEST_FILE: _TESTS,
    "tools/check.py": _CHECK,
    "runtest": "#!/bin/sh\nexec python3 tools/check.py redis\n",
    "configure": "#!/bin/sh\necho configured\n",
}
HIDDEN_TESTS = {TEST_FILE: _TESTS + _HIDDEN}
RIGHT_ANSWER = {"src/shop/cart.py": _CART.format(body=FIX)}
WRONG_ANSWER = {"src/shop/cart.py": _CART.format(body=MISTAKE)}

_LABEL = "megaflow.matrix"
_SITE = "usr/local/lib/python3.11/dist-packages"
_ENV = "opt/miniconda3/envs/testbed/bin"
_BUILDS = "mkdir -p build && cp -r src/. build/ || exit 1"
_PROGRAMS: Mapping[str, str] = {
    f"{_ENV}/python": '#!/bin/sh\nexec /usr/bin/python3 "$@"\n',
    f"{_ENV}/pytest": '#!/bin/sh\nexec /usr/bin/pytest-3 "$@"\n',
    f"{_ENV}/pip": '#!/bin/sh\nexec /usr/bin/python3 -m pip "$@"\n',
    "opt/miniconda3/bin/activate": 'conda() { export PATH="/opt/miniconda3/envs/testbed/bin:$PATH"; }\n',
    "usr/local/bin/python": '#!/bin/sh\nexec /usr/bin/python3 "$@"\n',
    "usr/local/bin/pytest": '#!/bin/sh\nexec /usr/bin/pytest-3 "$@"\n',
    "usr/local/bin/autoreconf": "#!/bin/sh\nexit 0\n",
    "usr/local/bin/cargo": f"#!/bin/sh\n{_BUILDS}\nexec python3 tools/check.py cargo\n",
    "usr/local/bin/make": '#!/bin/sh\ncase "$*" in *clean*) rm -rf build ;; *check*) exec python3 tools/check.py'
    f" automake ;; *) {_BUILDS} ;; esac\n",
    "root/.cargo/env": "true\n",
}
_PIP = f"""import shutil, sys
if "." in sys.argv and "-e" not in sys.argv:
    shutil.copytree("src", "/{_SITE}", dirs_exist_ok=True)
"""


def git(folder: Path, *words: str, stdin: str | None = None) -> str:
    """Run git so that the same content has the same commit everywhere."""
    moment = "2026-01-01T00:00:00Z"
    own = {"GIT_AUTHOR_DATE": moment, "GIT_COMMITTER_DATE": moment, "GIT_CONFIG_GLOBAL": os.devnull}
    identity = ["-c", "user.name=shop", "-c", "user.email=shop@example.org", "-c", "init.defaultBranch=main"]
    command = ["git", "-C", str(folder), *identity, "-c", "core.hooksPath=/dev/null", *words]
    done = subprocess.run(command, env=os.environ | own, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write files below a folder; those that begin with `#!` can be run."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
        if content.startswith("#!"):
            (folder / name).chmod(0o755)


@dataclass
class Repository:
    """The repository at its base commit in `folder`."""

    folder: Path
    base: str = ""

    @classmethod
    def made(cls, folder: Path, files: Mapping[str, str] = FILES) -> Repository:
        folder.mkdir(parents=True)
        git(folder, "init", "-q")
        made = cls(folder)
        made.base = made.commit("base", files)
        return made

    def commit(self, message: str, files: Mapping[str, str] | None = None, remove: tuple[str, ...] = ()) -> str:
        """The commit's name."""
        write(self.folder, files or {})
        for name in remove:
            (self.folder / name).unlink()
        git(self.folder, "add", "-A")
        git(self.folder, "commit", "-q", "-m", message)
        return git(self.folder, "rev-parse", "HEAD").strip()

    def patch(self, files: Mapping[str, str]) -> str:
        """The difference that these files make; nothing of it stays."""
        write(self.folder, files)
        git(self.folder, "add", "-A")
        found = git(self.folder, "diff", "--cached")
        git(self.folder, "reset", "-q", "--hard")
        return found


@dataclass(frozen=True)
class Patches:
    """The base commit of the plain repository and the patches that rows have."""

    base: str
    right: str
    wrong: str
    hidden: str

    @classmethod
    def of(cls, repository: Repository) -> Patches:
        return cls(
            repository.base,
            repository.patch(RIGHT_ANSWER),
            repository.patch(WRONG_ANSWER),
            repository.patch(HIDDEN_TESTS),
        )


@dataclass(frozen=True)
class Image:
    """An image of a dataset: where the repository lies in it and what else it brings."""

    names: tuple[str, ...]
    place: str = "/testbed"
    imported_from: str | None = None  # where Python finds the package; None: a copy, as a plain installation makes it
    workdir: str | None = None
    more: Mapping[str, str] = field(default_factory=dict)  # other files
    prepare: Callable[[Repository], object] = lambda _: None  # commits on top of the base

    @cached_property
    def parts(self) -> dict[str, str]:
        """The files of the image beside the repository."""
        own = {**_PROGRAMS, f"{_SITE}/pip/__main__.py": _PIP, f"{_SITE}/pip/__init__.py": ""}
        if self.imported_from is None:
            own |= {f"{_SITE}/{name.removeprefix('src/')}": FILES[name] for name in FILES if name.startswith("src/")}
        else:
            own[f"{_SITE}/shop.pth"] = f"{self.imported_from}\n"
        return {**own, **{name.removeprefix("/"): content for name, content in self.more.items()}}

    def build(self, client: docker.DockerClient, base_image: str) -> str:
        """Build it under all of its names; its id. Raises: RuntimeError: the engine has an image of that name."""
        for name in self.names:
            with suppress(ImageNotFound):
                if _LABEL not in client.images.get(name).labels:
                    raise RuntimeError(
                        f"expected no image {name} yet, found one: the dataset's own? Take another engine"
                    )
        with tempfile.TemporaryDirectory(prefix="mf-matrix-") as scratch:
            context = Path(scratch)
            repository = Repository.made(context / "root" / self.place.lstrip("/"))
            self.prepare(repository)
            write(context / "root", self.parts)
            start = self.workdir or self.place
            recipe = f"FROM {base_image}\nLABEL {_LABEL}=1\nCOPY root /\nRUN mkdir -p {start}\nWORKDIR {start}\n"
            (context / "Dockerfile").write_text(recipe)
            image, _ = client.images.build(path=str(context), rm=True, forcerm=True)
        for name in self.names:
            image.tag(name)
        return str(image.id)


def prepared(prepare: Callable[[Repository], Found]) -> Found:
    """What is said of a repository that is prepared as an image's is: its commits are the same."""
    with tempfile.TemporaryDirectory(prefix="mf-matrix-") as scratch:
        return prepare(Repository.made(Path(scratch) / "repository"))
