"""The keeper of a home, in a process of its own, as hosts have it: `ours_keeper.py OPTIONS`, until its input ends."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from ours import TIMEOUT_S, provider

from app.environments.warm import Keeper, Wish
from app.models.spec import EnvironmentSpec
from app.settings import Settings


def main() -> None:
    options = json.loads(sys.argv[1])
    settings = Settings(home=Path(options["home"]), installation=options["installation"])
    made_by = provider(options["kind"], settings)
    spec = EnvironmentSpec(image=options["image"])
    made_by.prepare_image(spec, timeout_s=TIMEOUT_S)
    ready = int(options["ready"])
    stop = threading.Event()
    keeper = Keeper(
        settings.home,
        settings.installation,
        queue=lambda: [Wish(spec, TIMEOUT_S)] * ready,
        provide=lambda kind: made_by,
        most=ready,
    )
    thread = threading.Thread(target=keeper.run, args=(stop,))
    thread.start()
    sys.stdin.read()
    stop.set()
    thread.join()


if __name__ == "__main__":
    main()
