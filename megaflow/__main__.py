"""The `megaflow` command, also as `python -m megaflow`."""

from __future__ import annotations

import sys

from megaflow import check_app


def main() -> None:
    """Run a command. Another package `app` in the way is said in one line."""
    try:
        check_app()
    except ImportError as error:
        sys.stderr.write(f"megaflow: {error}\n")
        sys.exit(78)
    from app.cli import main as run

    run()


if __name__ == "__main__":
    main()
