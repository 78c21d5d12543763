"""What one task may leave to the next: each kind with how it is planted, and how the next task would come upon it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Residue:
    """A kind of leftover. Both commands run as root with /bin/sh in the working folder, which is a git repository."""

    name: str
    plant: str
    look: str
    """What it writes to stdout is another text when the leftover is there."""
    refusable: bool = False
    """A hardened environment does not let it be planted: `plant` fails then."""
    inherited: bool = False
    """It reaches later commands only where a process of ours inside starts them."""


def _python(code: str) -> str:
    return f"python3 -IS - <<'CODE'\n{code}\nCODE"


_UNCOUNTED = r"sed -E 's/^([^ ]+) +[0-9]+ /\1 /'"
"""Without the number of links: a file of the image has more of them whenever another host process links its layer."""


def _listing(*folders: str) -> str:
    return "ls -lAn --time-style=+ " + " ".join(folders) + f" 2>/dev/null | grep -v ^total | {_UNCOUNTED}"


_RENAMED = """
import ctypes, os, sys, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
ctypes.CDLL(None).prctl(15, b"residue-kworker", 0, 0, 0)
for number in range(3): os.close(number)
os.closerange(3, 300)
time.sleep(4000)
"""
_LISTENERS = """
import os, socket, sys, time
made = [socket.socket() for _ in range(2)] + [socket.socket(type=socket.SOCK_DGRAM)]
made[0].bind(("0.0.0.0", 4711)); made[1].bind(("127.0.0.1", 4712)); made[2].bind(("0.0.0.0", 4713))
for one in made[:2]: one.listen()
named = [socket.socket(socket.AF_UNIX) for _ in range(2)]
named[0].bind("\\0residue"); named[1].bind("/run/residue.sock")
for one in named: one.listen()
if os.fork():
    os._exit(0)
os.setsid()
null = os.open("/dev/null", os.O_RDWR)
for number in range(3): os.dup2(null, number)
time.sleep(4000)
"""
_RESOLVER = "0B00007F"
"""127.0.0.11: on a network of its own the engine answers there, each time at other ports."""
_EVERYBODY = "for p in /proc/[0-9]*; do {each} || ! [ -d $p ] || exit 1; done"

RESIDUES = [
    Residue("a new file", "echo x > /srv/residue", _listing("/srv/residue")),
    Residue(
        "a file changed under its old size and time",
        't=$(stat -c %y /etc/debian_version); tr "[0-9]" x < /etc/debian_version > /tmp/other'
        ' && cat /tmp/other > /etc/debian_version; touch -d "$t" /etc/debian_version',
        "stat -c '%s %y' /etc/debian_version; cksum < /etc/debian_version",
    ),
    Residue("a deleted file", "rm /etc/issue.net", _listing("/etc/issue*")),
    Residue("a folder made anew", "rm -r /etc/skel && mkdir /etc/skel && touch /etc/skel/new", _listing("/etc/skel")),
    Residue("a changed mode", "chmod 777 /etc/issue", "stat -c %a /etc/issue"),
    Residue("a changed owner", "chown 1234:4321 /etc/host.conf", "stat -c %u:%g /etc/host.conf"),
    Residue("the root folder's mode", "chmod 711 /", "stat -c %a /"),
    Residue("the working folder's mode and group", "chmod 1777 . && chgrp 7 .", "stat -c %a:%u:%g ."),
    Residue("a file's time", "touch -d 2001-01-01 /etc/shells", "stat -c %y /etc/shells"),
    Residue(
        "an extended attribute",
        _python("import os; os.setxattr('/etc/debconf.conf', 'user.residue', b'1')"),
        _python("import os; print(os.listxattr('/etc/debconf.conf'))"),
    ),
    Residue(
        "an access list",
        _python(
            "import os, struct\n"
            "entries = [(1, 6, 2**32 - 1), (2, 7, 1234), (4, 4, 2**32 - 1), (16, 7, 2**32 - 1), (32, 4, 2**32 - 1)]\n"
            "packed = struct.pack('<I', 2) + b''.join(struct.pack('<HHI', *one) for one in entries)\n"
            "os.setxattr('/etc/deluser.conf', 'system.posix_acl_access', packed)"
        ),
        _python("import os; print(os.listxattr('/etc/deluser.conf'))"),
    ),
    Residue(
        "a flag of an inode", "cp /etc/issue /srv/flagged && chattr +A /srv/flagged", "lsattr /srv/flagged 2>/dev/null"
    ),
    Residue(
        "an immutable file",
        "touch /srv/immutable; chattr +i /srv/immutable",
        "lsattr /srv/immutable 2>/dev/null | grep -- -i-",
        refusable=True,
    ),
    Residue("a hard link", "ln /etc/shadow /srv/shadow", "ls /srv/shadow 2>&1"),
    Residue(
        "a system folder swapped for a link",
        "mv /usr/share/bug /srv/ && mkdir /tmp/fake && ln -s /tmp/fake /usr/share/bug",
        f"ls -ld --time-style=+ /usr/share/bug | {_UNCOUNTED}",
    ),
    Residue("a pipe", "mkfifo /var/lib/residue.pipe", _listing("/var/lib/*.pipe")),
    Residue("a device", "mknod /var/lib/disk b 254 0", _listing("/var/lib/disk"), refusable=True),
    Residue("a whiteout", "mknod /etc/residue-whiteout c 0 0", _listing("/etc/residue-whiteout"), refusable=True),
    Residue(
        "names and attributes by which layers delete",
        "touch /etc/.wh.passwd /etc/.wh..wh..opq && "
        + _python(
            "import os\nfor name in ('opaque', 'whiteout'): os.setxattr('/etc/apt', f'user.overlay.{name}', b'y')"
        ),
        _listing("/etc/.wh*") + "; " + _python("import os; print(os.listxattr('/etc/apt'))"),
    ),
    Residue(
        "a set-uid shell",
        "cp /bin/sh /usr/local/bin/root && chmod 4755 /usr/local/bin/root",
        _listing("/usr/local/bin/root"),
    ),
    Residue(
        "a file larger than memory",
        "head -c 200000000 /dev/zero > /var/cache/large",
        "stat -c %s /var/cache/large 2>&1",
    ),
    Residue("a file of ten sparse gigabytes", "truncate -s 10G /var/cache/sparse", _listing("/var/cache/sparse")),
    Residue(
        "ten thousand files",
        "mkdir /var/cache/many && cd /var/cache/many && seq 10000 | xargs touch",
        "ls /var/cache/many 2>/dev/null | wc -l",
    ),
    Residue(
        "names that are no text",
        _python("open(b'/srv/\\xff\\n\\x01 -rf', 'w').close()"),
        _python("import os; print(os.path.lexists(b'/srv/\\xff\\n\\x01 -rf'))"),
    ),
    Residue(
        "a folder that nobody may enter", "mkdir -p /srv/closed/in && chmod 0 /srv/closed", "ls -d /srv/closed 2>&1"
    ),
    Residue("a file in shared memory", "echo x > /dev/shm/residue", _listing("/dev/shm")),
    Residue(
        "files in /tmp and /run",
        "touch /tmp/.residue /var/tmp/residue /run/residue",
        _listing("/tmp/.residue", "/var/tmp/residue", "/run/residue"),
    ),
    Residue("a file among the devices", "echo x > /dev/residue", _listing("/dev/residue")),
    Residue(
        "a mount",
        "mkdir -p /mnt/m && mount -t tmpfs none /mnt/m",
        "cut -d' ' -f5 /proc/self/mountinfo | sort",
        refusable=True,
    ),
    Residue("a message queue", "touch /dev/mqueue/residue", _listing("/dev/mqueue")),
    Residue("System V memory, queues and semaphores", "ipcmk -M 4096 -Q -S 3", "tail -qn +2 /proc/sysvipc/*"),
    Residue(
        "a process in the background",
        "sleep 4711 > /dev/null 2>&1 &",
        "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -o 'sleep 471[1]'",
    ),
    Residue("a renamed daemon", _python(_RENAMED), "cat /proc/[0-9]*/comm | grep residu[e]"),
    Residue(
        "a stopped process",
        "sleep 4712 > /dev/null 2>&1 & kill -STOP $!",
        "grep -l '^State:.T' /proc/[0-9]*/status 2>/dev/null | wc -l",
    ),
    Residue(
        "listening sockets",
        _python(_LISTENERS),
        f"tail -qn +2 /proc/net/tcp /proc/net/udp | cut -d: -f2-3 | grep -v {_RESOLVER};"
        "grep -o '[@/]run/residue.*\\|@residue' /proc/net/unix",
    ),
    Residue(
        "limits of whoever starts commands",
        _EVERYBODY.format(each="prlimit --pid ${p#/proc/} --nofile=300:300"),
        "ulimit -n; ulimit -Hn",
        inherited=True,
    ),
    Residue(
        "the priority of whoever starts commands",
        "renice -n 7 -p $(ls /proc | grep '^[0-9]'); true",
        "nice",
        inherited=True,
    ),
    Residue(
        "the processors of whoever starts commands",
        "for p in /proc/[0-9]*; do taskset -p 1 ${p#/proc/}; done > /dev/null 2>&1; true",
        "grep Cpus_allowed: /proc/self/status",
        inherited=True,
    ),
    Residue(
        "profiles",
        "for f in /etc/profile ~/.profile ~/.bashrc /etc/bash.bashrc; do echo 'export RESIDUE=yes' >> $f; done;"
        "echo RESIDUE=yes > /etc/environment; echo 'RESIDUE=yes' > /etc/profile.d/residue.sh",
        'sh -lc "echo \\$RESIDUE"; bash -ic "echo \\$RESIDUE" 2>/dev/null; cat /etc/environment; ls /etc/profile.d',
    ),
    Residue(
        "users and groups",
        "useradd -m -p x residue && groupadd residues && mkdir -p /etc/sudoers.d && echo x > /etc/sudoers.d/residue",
        "getent passwd; getent group; wc -l /etc/shadow; ls -A /home; ls /etc/sudoers.d 2>&1",
    ),
    Residue(
        "cron and at jobs",
        "mkdir -p /var/spool/cron/crontabs /var/spool/cron/atjobs; echo '* * * * * root true' > /etc/cron.d/residue;"
        "echo '* * * * * true' > /var/spool/cron/crontabs/root; echo true > /var/spool/cron/atjobs/a0000101",
        "find /etc/cron* /var/spool/cron 2>/dev/null | sort",
    ),
    Residue(
        "a shell's history", "for n in bash python sh; do echo secret > ~/.${n}_history; done", "ls -A ~ | grep history"
    ),
    Residue(
        "a package of the user's own",
        "d=$(python3 -IS -c 'import site; print(site.getusersitepackages())'); mkdir -p $d;"
        "echo 'print(\"mine\")' > $d/usercustomize.py",
        "python3 -c pass | grep mine",
    ),
    Residue(
        "a path that Python follows",
        "d=$(python3 -IS -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))'); mkdir -p $d;"
        "echo 'import sys; print(\"followed\")' > $d/residue.pth",
        "python3 -c pass | grep followed",
    ),
    Residue("a preloaded library", "echo /srv/residue.so > /etc/ld.so.preload", "cat /etc/ld.so.preload 2>&1"),
    Residue(
        "a program before another on the path",
        "printf '#!/bin/sh\\necho residue\\n' > /usr/local/bin/factor && chmod 755 /usr/local/bin/factor",
        "factor 6",
    ),
    Residue(
        "names of hosts",
        "for f in hosts resolv.conf hostname; do echo '10.6.6.6 pypi.invalid' >> /etc/$f || exit 1; done",
        "cat /etc/hosts /etc/resolv.conf /etc/hostname | sed s/$(hostname)/itself/",
    ),
    Residue(
        "another zone of time",
        "ln -sf /usr/share/zoneinfo/Etc/GMT+7 /etc/localtime",
        f"ls -l --time-style=+ /etc/localtime 2>&1 | {_UNCOUNTED}",
    ),
    Residue("a name of the machine", "hostname residue", "hostname | grep residue", refusable=True),
    Residue(
        "a setting of the kernel",
        "echo 1 > /proc/sys/net/ipv4/ip_forward",
        "cat /proc/sys/net/ipv4/ip_forward",
        refusable=True,
    ),
    Residue(
        "another helper of the session",
        "for f in /.megaflow-session /.megaflow-helper /dev/.megaflow-helper; do"
        " [ -e $f ] || continue; rm $f && cp /bin/true $f; exit $?; done; exit 1",
        "cksum /.megaflow-session /.megaflow-helper /dev/.megaflow-helper",
        refusable=True,
    ),
    Residue(
        "git's configuration",
        "git config --global core.editor residue; git config --system alias.st residue; git config user.name residue",
        "git config --list --show-origin",
    ),
    Residue(
        "a hook of the repository",
        "printf '#!/bin/sh\\n' > .git/hooks/pre-commit && chmod 755 .git/hooks/pre-commit",
        _listing(".git/hooks"),
    ),
    Residue("a stash", "echo stashed >> tracked && git stash -q", "git stash list"),
    Residue(
        "commits and branches",
        "git checkout -qb residue && git commit -qm residue --allow-empty",
        "git log --all --oneline",
    ),
    Residue(
        "untracked and ignored files",
        "touch untracked; echo '*.o' > .git/info/exclude; touch x.o",
        "git status --porcelain --ignored",
    ),
    Residue(
        "a change that the index hides",
        "git update-index --assume-unchanged hidden && echo changed > hidden",
        "git ls-files -v; cat hidden",
    ),
]

REPOSITORY = """\
git init -q . && git config user.email t@example.invalid && git config user.name Tester && \
echo one > tracked && echo two > hidden && git add . && git commit -qm first\
"""
"""Makes the repository that the working folder is."""

DEEP = _python("""
import os
for level in range(1500):
    os.mkdir("residue-deep"); os.chdir("residue-deep")
open("bottom", "w").close()
""")
"""Makes folders whose names together are longer than a path may be, and which are more than a program's calls."""

_OUTSIDE_FILES = "('/etc/hosts', '/etc/resolv.conf', '/etc/hostname')"
_EACH_OUTSIDE = "for f in hosts resolv.conf hostname; do {} /etc/$f || exit 1; done"
OUTSIDE = {
    "an attribute": _python(f"import os\nfor f in {_OUTSIDE_FILES}: os.setxattr(f, 'user.residue', b'1')"),
    "a flag": _EACH_OUTSIDE.format("chattr +A"),
    "a mode": _EACH_OUTSIDE.format("chmod 600"),
    "an owner": _EACH_OUTSIDE.format("chown 7:7"),
}
"""What is done to files that an engine mounts from outside of the layer; each may be refused, or not be undone."""
LOOK_OUTSIDE = (
    _python(f"import os\nfor f in {_OUTSIDE_FILES}: print(os.listxattr(f), os.stat(f).st_mode, os.stat(f).st_uid)")
    + "\nlsattr /etc/hosts /etc/resolv.conf /etc/hostname 2>/dev/null; true"
)


def remove_deep(home: Path) -> None:
    """Remove what `DEEP` made in environments of `home` that could not be removed: not even pytest could afterwards."""
    find = ["find", str(home), "-name", "residue-deep", "-prune", "-exec", "rm", "-rf", "{}", "+"]
    subprocess.run(find, check=False, capture_output=True)
