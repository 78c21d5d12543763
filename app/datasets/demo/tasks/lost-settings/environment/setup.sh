#!/bin/sh
# A repository whose settings file was deleted a few commits ago. WORKDIR: where (default /app).
set -eu
umask 022
here=$(cd "$(dirname "$0")" && pwd)
target=${WORKDIR:-/app}
mkdir -p "$target"
cd "$target"

export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
export GIT_AUTHOR_DATE='2024-05-02T08:30:00+0000' GIT_COMMITTER_DATE='2024-05-02T08:30:00+0000'
git -c init.defaultBranch=main init --quiet --template=
git config user.name service
git config user.email service@example.invalid
git config commit.gpgSign false
git config core.autocrlf false
save() { git add --all && git commit --quiet -m "$1"; }

cp "$here/service.py" .
mkdir config docs
printf '[server]\nhost = 127.0.0.1\nport = 8080\n' >config/service.ini
printf '# Ports\n\n| service | port |\n|---|---|\n| orders | 8080 |\n' >docs/ports.md
save "Service and settings"

printf '[server]\nhost = 127.0.0.1\nport = 8080\nworkers = 4\n\n[limits]\nbody_bytes = 65536\n' >config/service.ini
save "Limit the size of a body"

printf '[server]\nhost = 127.0.0.1\nport = 8080\nworkers = 6\n\n[limits]\nbody_bytes = 131072\nidle_s = 30\n' >config/service.ini
save "Six workers, close idle connections"

git rm --quiet -r config
printf '*.log\n' >.gitignore
save "Tidy up"

printf '# Ports\n\n| service | port |\n|---|---|\n| billing | 8080 |\n| orders | 9090 |\n' >docs/ports.md
save "Orders give their port to billing"

printf 'Orders\n======\n\nRun `python3 service.py`. Its port is in docs/ports.md.\n' >README.md
save "Say how to run it"
