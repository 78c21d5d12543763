#!/bin/sh
# Makes this task's repository: the library's released source with the bug planted and the tests that show it removed.
#
# WORKDIR   where (default /testbed); must be empty or absent
#
# Runs as root in `docker build` and as anybody on a host. The commit is the same on every machine: the rows name it as
# base_commit. So nothing of the machine's may leak in: no git configuration, no clock, no umask.
set -eu
umask 022

here=$(cd "$(dirname "$0")" && pwd)
target=${WORKDIR:-/testbed}

mkdir -p "$target"
cd "$target"
if [ -n "$(ls -A)" ]; then
    echo "expected $target to be empty; set WORKDIR to another folder" >&2
    exit 65
fi

set -- "$here"/sources/*.tar.gz
if [ $# != 1 ] || [ ! -f "$1" ]; then
    echo "expected one source archive in $here/sources; fetch what $here/sources.txt names" >&2
    exit 66
fi
tar -xzf "$1" --strip-components=1 --no-same-owner

unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_NAMESPACE
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1 GIT_ATTR_NOSYSTEM=1 GIT_DEFAULT_HASH=sha1 HOME=/nonexistent
export GIT_AUTHOR_NAME=upstream GIT_AUTHOR_EMAIL=upstream@example.invalid GIT_AUTHOR_DATE='2024-01-01T00:00:00+0000'
export GIT_COMMITTER_NAME=upstream GIT_COMMITTER_EMAIL=upstream@example.invalid
export GIT_COMMITTER_DATE='2024-01-01T00:00:00+0000'

git -c init.defaultBranch=main init --quiet --template=
# Kept in the repository, so that a later `git add` under somebody's own configuration gives the same patch.
git config core.autocrlf false
git config core.fileMode true
git config core.excludesFile /dev/null
git config commit.gpgSign false

# Before the first `git add`: the sound code never becomes an object in which an agent could find the answer.
git apply "$here/bug.patch"
git apply "$here/hide-tests.patch"
git add --all --force
git commit --quiet --message "released source"

# What running the tests leaves behind is nobody's patch.
mkdir -p .git/info
printf '%s\n' '__pycache__/' '*.pyc' '.pytest_cache/' '.hypothesis/' > .git/info/exclude
