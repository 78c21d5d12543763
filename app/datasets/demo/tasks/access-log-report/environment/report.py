"""Summarises a web server's access log: python3 report.py FILE"""

import json
import re
import sys
from collections import Counter

LINE = re.compile(r'(\d+\.\d+\.\d+\.\d+) - - \[[^]]+\] "[^"]*" (\d{3}) (\d+)')


def summarise(lines):
    requests = errors = size = 0
    clients = Counter()
    for line in lines:
        found = LINE.match(line)
        address, status, sent = found.groups()
        requests += 1
        size += int(sent)
        if int(status) > 500:
            errors += 1
        clients[address] += 1
    return {"requests": requests, "errors": errors, "bytes": size, "top": clients.most_common(3)}


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        print(json.dumps(summarise(file)))
