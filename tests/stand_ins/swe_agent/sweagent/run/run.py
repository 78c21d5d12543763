"""`sweagent COMMAND OPTIONS`: of the real one's commands only `run`."""

import sys


def main(args=None):
    args = list(sys.argv[1:] if args is None else args)
    command = args.pop(0) if args else ""
    if command not in ("run", "r"):
        print(f"unknown command {command!r}", file=sys.stderr)
        return 2
    from sweagent.run.run_single import run_from_cli

    return run_from_cli(args)
