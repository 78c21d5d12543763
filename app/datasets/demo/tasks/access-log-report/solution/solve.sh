#!/bin/bash
set -eu
cd "${WORKDIR:-/app}"
cat >report.py <<'END'
"""Summarises a web server's access log: python3 report.py FILE"""

import json
import re
import sys
from collections import Counter

LINE = re.compile(r'(\S+) \S+ \S+ \[[^]]+\] "[^"]*" (\d{3}) (\d+|-)$')


def summarise(lines):
    requests = skipped = errors = size = 0
    clients = Counter()
    for line in lines:
        if not line.strip():
            continue
        found = LINE.match(line.rstrip())
        if not found:
            skipped += 1
            continue
        address, status, sent = found.groups()
        requests += 1
        size += 0 if sent == "-" else int(sent)
        errors += 500 <= int(status) <= 599
        clients[address] += 1
    top = sorted(clients.items(), key=lambda pair: (-pair[1], pair[0]))[:3]
    return {"requests": requests, "skipped": skipped, "errors": errors, "bytes": size, "top": top}


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        print(json.dumps(summarise(file)))
END
