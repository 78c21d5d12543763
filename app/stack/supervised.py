"""Runs supervisord so that only the programs that need provider keys get them.

`python -m app.stack.supervised -c FILE`, with JSON on standard input: `keys` (by variable) and `programs` (names). The
keys stay in supervisord's memory, so that a restarted program gets them again.
"""

from __future__ import annotations

import json
import sys

from supervisor.options import ServerOptions
from supervisor.supervisord import go


def main(argv: list[str]) -> None:
    payload = json.load(sys.stdin)
    options = ServerOptions()
    options.realize(argv, doc=__doc__)
    for group in options.process_group_configs:
        for program in group.process_configs:
            if program.name in payload["programs"]:
                program.environment = {**(program.environment or {}), **payload["keys"]}
    options.first, options.test = True, False
    go(options)


if __name__ == "__main__":
    main(sys.argv[1:])
