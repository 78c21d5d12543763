"""`megaflow sweep resources`: a task that needs more than it is guaranteed, at two sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.acceptance.conftest import System

pytestmark = [pytest.mark.docker, pytest.mark.timeout(400)]

HUNGRY = "python3 -c \"held = b'x' * (100 << 20); open('answer', 'w').write('done')\""
BUSY = (
    'python3 -c "import time; t = time.process_time()\nwhile time.process_time() < t + 0.5: pass"; echo done > answer'
)
INSIDE = '[ $(nproc) = 1 ] && [ "$MAKEFLAGS" = -j1 ] && [ "$PYTEST_XDIST_AUTO_NUM_WORKERS" = 1 ]'


@pytest.mark.extra
def test_a_sweep_shows_what_the_kill_at_size_does_to_a_score(system: System, task_folder: Callable[..., Path]) -> None:
    for name, solve in (("hungry", HUNGRY), ("busy", f"{INSIDE} || exit 3\n{BUSY}")):
        file = task_folder(name, solve=solve) / "task.toml"
        file.write_text(f"{file.read_text()}cpus = 0.25\nmemory_mb = 64\n")
    asked = ("-d", str(file.parent.parent), "-a", "oracle", "--name", "sizes")
    once, thrice = system.json("sweep", "resources", "1x,3x", *asked)
    assert [line["figures"]["name"] for line in (once, thrice)] == ["1x", "3x"]
    assert [line["figures"]["solved"] for line in (once, thrice)] == [1, 2], "64 MiB are too few, 192 are not"
    assert [line["figures"]["memory_kills"] for line in (once, thrice)] == [1, 0]
    assert once["figures"]["throttled_s"] > thrice["figures"]["throttled_s"] >= 0
    assert (thrice["tasks"], thrice["difference"]["value"], once["difference"]) == (2, 0.5, None)

    shown = system.megaflow("show", "sizes-1x/hungry").stdout
    assert "resources: 0.25 cpus, 64 MiB guaranteed; kill at 0.25 cpus, 64 MiB" in shown
    assert "out of memory: 1 killed at the memory limit of 67108864 bytes (1 in agent)" in shown
    assert "throttled: " in system.megaflow("show", "sizes-1x/busy").stdout
    refused = system.megaflow("compare", "sizes-1x", "sizes-1x", "--allow", "size")
    assert "expected image, limits, resources, agent, prompt, grader; found 'size'" in refused.stderr.replace("\n", " ")

    table = system.megaflow("sweep", "resources", "1x,2x", *asked, "--task", "busy")
    header, first, second = (line.split("\t") for line in table.stdout.splitlines())
    assert (header[0], first[0], second[0]) == ("kill at", "1x", "2x")
    assert second[header.index("difference")] == "+0.0 points"
    for wrong in ("1x", "1x,1x", "1x,0.5x", "three"):
        assert system.megaflow("sweep", "resources", wrong, *asked).returncode == 64
