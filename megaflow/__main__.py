"""The `megaflow` command, also as `python -m megaflow`."""

from __future__ import annotations

import sys

from megaflow import check_app


def main() -> None:
    """Runs a command. If another package `app` is imported first, prints one line and exits with 78."""
    try:
        check_app()
    except ImportError as error:
        sys.stderr.write(f"megaflow: {error}\n")
        sys.exit(78)
    from app.cli import main as run

    run()


if __name__ == "__main__":
    main()
