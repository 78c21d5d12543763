#!/bin/sh
# Builds the base of the demo's task images from Debian packages alone, for machines without an image registry:
#
#     sh worker_images/base/build-from-packages.sh [TAG]        (default: megaflow/base:bookworm)
#
# DEBIAN_SUITE   the release to install (default: bookworm)
# DEBIAN_PACKAGES  further packages, with commas between
# DEBIAN_MIRROR  a mirror's address or a sources.list line (default: mmdebstrap's own)
#
# Prints the image's id on stdout. Leaves with 69 when something that it needs is missing or out of reach.
set -eu

tag=${1:-megaflow/base:bookworm}
suite=${DEBIAN_SUITE:-bookworm}
here=$(cd "$(dirname "$0")" && pwd)

give_up() {
    printf 'base image %s was not built: %s\n' "$tag" "$1" >&2
    printf 'try: %s\n' "$2" >&2
    exit 69
}

other_way="where an image registry answers, docker build -t $tag $here gives the same image"

docker version --format '{{.Server.Version}}' >/dev/null 2>&1 ||
    give_up "no container engine answers" "start one (Debian: apt-get install docker.io), or set DOCKER_HOST"

if ! command -v mmdebstrap >/dev/null 2>&1; then
    command -v apt-get >/dev/null 2>&1 || give_up "mmdebstrap is missing and this is no Debian" "$other_way"
    [ "$(id -u)" = 0 ] || give_up "mmdebstrap is missing" "as root: apt-get install mmdebstrap; or, $other_way"
    export DEBIAN_FRONTEND=noninteractive
    # Only when the lists are too old to know the package: an update costs more than the install.
    apt-get install -y --no-install-recommends mmdebstrap >&2 ||
        { apt-get update >&2 && apt-get install -y --no-install-recommends mmdebstrap >&2; } ||
        give_up "apt-get cannot install mmdebstrap" "repair apt's sources; or, $other_way"
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

packages=$(sed -e 's/#.*//' "$here/packages.txt" | xargs | tr ' ' ',')${DEBIAN_PACKAGES:+,$DEBIAN_PACKAGES}

# Manuals and translations are a fifth of the size and no task reads them; licences stay.
# A file, not a pipe: `docker import` would make an image of half a tree when mmdebstrap fails.
set -- --quiet --variant=minbase --include="$packages" \
    --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    "$suite" "$work/base.tar" ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"}
mmdebstrap "$@" >&2 </dev/null ||
    give_up "mmdebstrap could not install $suite ($packages)" \
        "check that the Debian mirror answers (DEBIAN_MIRROR names another); or, $other_way"

docker import \
    --change "LABEL megaflow=base megaflow.base=$suite" \
    --change 'ENV LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1' \
    --change 'CMD ["bash"]' \
    "$work/base.tar" "$tag" ||
    give_up "docker import failed" "free disk space for about 300 MB, or read the engine's log"
