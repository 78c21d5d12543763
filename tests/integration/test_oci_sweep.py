"""Nothing is left: who made environments without a daemon is killed at any moment, and another process cleans up."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from app.environments.runtimes.oci import OciProvider, Records, end
from app.errors import EnvironmentFailed
from app.host import environment_records
from app.host.environment_records import Record
from app.models.spec import EnvironmentSpec
from app.settings import Settings
from tests.integration.oci_ground import alive, left_over, tags
from tests.integration.oci_ground import oci as oci
from tests.integration.oci_ground import oci_cache as oci_cache
from tests.integration.oci_ground import oci_programs as oci_programs
from tests.integration.oci_ground import oci_settings as oci_settings
from tests.integration.oci_ground import tiny as tiny

WORKER = """
import sys, threading
from pathlib import Path
from app.environments.runtimes.oci import OciProvider
from app.models.spec import EnvironmentSpec
from app.settings import Settings
from tests.integration.oci_ground import tags

settings = Settings(home=Path(sys.argv[1]), installation=sys.argv[2], docker_url="unix:///nowhere")
provider = OciProvider(settings, fetch_bundle=lambda bundle: b"")
spec = EnvironmentSpec(image=sys.argv[3], setup=("echo made > /made",) if sys.argv[4] == "set-up" else ())

def work():
    while True:
        environment = provider.create(spec, tags(settings.installation), timeout_s=30)
        environment.run("sleep 100 & echo x > /x", timeout_s=10)
        environment.reset()
        environment.destroy()

provider.store
print("ready", flush=True)
workers = [threading.Thread(target=work) for _ in range(3)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
"""


@pytest.mark.parametrize(("what", "after_s"), [("plain", 0.01), ("plain", 0.06), ("plain", 0.23), ("set-up", 0.11)])
def test_a_worker_killed_at_any_moment_leaves_what_a_sweep_removes(
    oci: OciProvider,
    oci_settings: Settings,
    tiny: EnvironmentSpec,
    monkeypatch: pytest.MonkeyPatch,
    after_s: float,
    what: str,
) -> None:
    words = [str(oci_settings.home), oci_settings.installation, str(tiny.image), what]
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, *words], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as worker:
        assert worker.stdout is not None
        assert b"ready\n" in iter(worker.stdout.readline, b"")
        time.sleep(after_s)
        worker.kill()
    monkeypatch.setattr(
        environment_records, "_YOUNG_S", 0.0
    )  # who was killed before it could say whose it is counts at once
    oci.sweep(installation=oci_settings.installation)
    assert left_over(oci_settings.home) == []
    assert alive(oci_settings.home) == []
    after = oci.create(tiny, tags(oci_settings.installation), timeout_s=30)
    assert after.run("true", timeout_s=10).ok
    after.destroy()


def test_another_process_ends_an_environment_with_a_running_command(
    oci: OciProvider, oci_settings: Settings, tiny: EnvironmentSpec
) -> None:
    environment = oci.create(tiny, tags(oci_settings.installation), timeout_s=30)
    environment.run("sleep 1000 > /dev/null 2>&1 & sleep 1000 > /dev/null 2>&1 &", timeout_s=10)
    other = OciProvider(oci_settings, fetch_bundle=lambda bundle: b"")
    assert other.sweep(installation=oci_settings.installation, keep={environment.id: True}) == []
    assert other.sweep(installation="somebody-elses") == []
    assert environment.run("true", timeout_s=10).ok
    assert other.sweep(installation=oci_settings.installation) == [environment.id]
    assert alive(oci_settings.home) == []
    with pytest.raises(EnvironmentFailed, match="removed by somebody else"):
        environment.run("true", timeout_s=5)
    environment.destroy()


def test_who_knows_the_home_and_the_id_can_end_an_environment(
    oci: OciProvider, oci_settings: Settings, tiny: EnvironmentSpec
) -> None:
    environment = oci.create(tiny, tags(oci_settings.installation), timeout_s=30)
    home = oci_settings.home.resolve()
    (record,) = Records(home).all()
    assert (record.id, record.installation) == (environment.id, oci_settings.installation)
    assert time.time() < record.deadline_unix_s < time.time() + 601
    end(home, record.id)
    end(home, record.id)
    assert (left_over(home), alive(home)) == ([], [])
    environment.destroy()


def test_an_adopted_environment_is_its_new_owners(
    oci: OciProvider, oci_settings: Settings, tiny: EnvironmentSpec
) -> None:
    environment = oci.create(tiny, tags("test-first"), timeout_s=30)
    environment.adopt(tags(oci_settings.installation))
    assert oci.sweep(installation="test-first") == []
    assert [record.id for record in oci._site.records.all()] == [environment.id]
    assert oci.sweep(installation=oci_settings.installation) == [environment.id]
    environment.destroy()


def test_a_record_torn_by_a_full_disk_is_nobodys_and_goes_when_it_is_old(
    oci: OciProvider, oci_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = oci._site.records
    kept.write(Record("torn", {"megaflow": "x"}, "x", "y"))
    (kept.place("torn") / "record.json").write_text('{"id": "torn", "lab')
    assert oci.sweep(installation=oci_settings.installation) == []
    monkeypatch.setattr(environment_records, "_YOUNG_S", 0.0)
    assert oci.sweep(installation=oci_settings.installation) == ["torn"]
    assert left_over(oci_settings.home) == []
