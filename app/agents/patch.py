"""Takes the agent's changes from the environment as a patch, whatever it did to the repository's index.

Frameworks report patches of their own; ours is the one that counts, because each of theirs can be empty or partial.
"""

from __future__ import annotations

import posixpath
import shlex

from app.errors import AgentFailed
from app.models.shell import Shell

MAX_BYTES = 50 << 20
_TIMEOUT_S = 180.0
_NO_REPOSITORY, _TOO_LARGE = 40, 41

# Leavings of running the tests are nobody's patch.
_LEFT_OUT = ("**/__pycache__/**", "**/.pytest_cache/**", "**/*.pyc")
PATHS = " ".join(shlex.quote(path) for path in (".", *(f":(exclude,glob){pattern}" for pattern in _LEFT_OUT)))

# All by way of a passing index and object folder: the agent's own stay as it left them, a lock that a killed git left
# behind does not matter, and a repository of another owner need not be written to. The passing configuration stands
# in for everybody else's. The result lies in a file, as what a command prints comes back without its middle: a new one,
# as an agent may have made one of any name, and elsewhere where the folder cannot be written to. The copied index keeps
# its time: by it git knows which files may have changed in the moment it was written, and reads those.
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
_TAKE = """
mkdir "$scratch/objects" && export GIT_OBJECT_DIRECTORY="$scratch/objects" GIT_ALTERNATE_OBJECT_DIRECTORIES="$home"
base={base}
[ -n "$base" ] || base=$(git rev-parse --quiet --verify "HEAD^{{commit}}") || base=$(git hash-object -t tree /dev/null)
[ ! -e "$index" ] || {{ cp "$index" "$scratch/index" && touch -r "$index" "$scratch/index"; }}
export GIT_INDEX_FILE="$scratch/index"
# Files that the agent told git to take for unchanged; those that a sparse checkout has not are left as they are.
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


def head_commit(shell: Shell, workdir: str) -> str | None:
    """The commit that `workdir` stands at, or None where there is no repository or no commit yet.

    Asked before the agent starts, it is the base to take the patch against: images may carry a commit of their own on
    top of the one that a dataset names, and an agent may commit.
    """
    result = shell.run(
        PREPARE + 'git rev-parse --quiet --verify "HEAD^{commit}"', cwd=workdir, timeout_s=_TIMEOUT_S, stdin=b""
    )
    return result.stdout.decode().strip() or None if result.ok else None


def take_patch(shell: Shell, workdir: str, base_commit: str | None) -> bytes | None:
    """What `workdir` holds beyond `base_commit` (None: beyond its HEAD, if any), new and binary files included.

    None where `workdir` is not the root of a git repository; empty when nothing changed. What .gitignore names is left
    out, and so is what running tests leaves behind.

    Raises: AgentFailed: more than MAX_BYTES, or a repository that is gone or that git cannot read any more.
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
            place = result.stdout.decode("utf-8", "replace").strip()
            patch = shell.get(posixpath.join(workdir, place))
            shell.run(f"rm -f {shlex.quote(place)}", cwd=workdir, timeout_s=_TIMEOUT_S)
            return patch
        case code if code == _NO_REPOSITORY:
            if base_commit is None:
                return None
            raise AgentFailed(
                f"expected the git repository that {workdir} was when the agent began, found no .git there: what it"
                " changed cannot be told"
            )
        case code if code == _TOO_LARGE:
            raise AgentFailed(f"expected a patch of at most {MAX_BYTES >> 20} MiB; found a larger one in {workdir}")
    words = f"no end within {_TIMEOUT_S:g} s" if result.timed_out else result.text().strip()[-800:]
    raise AgentFailed(f"expected `git diff` against {base_commit or 'HEAD'} in {workdir} to work; found {words}")
