"""Resource classes against a real PostgreSQL."""

from __future__ import annotations

from typing import Any

import pytest

from app.cli.resource_classes import size_bytes
from app.errors import LimitInvalid, SpecInvalid
from app.ledger import classes
from app.ledger.classes import ResourceClass
from app.ledger.database import Database
from app.models.resources import Resources
from app.models.spec import Mode
from app.settings import Settings
from tests.building import a_spec
from tests.integration.command import CommandLine
from tests.integration.rows import a_run, a_task, an_instance, facts, write
from tests.services import MakeSettings


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings(ephemeral_capacity=7, persistent_instances=2, persistent_slots=3)


def offers(database: Database, settings: Settings) -> dict[str, ResourceClass]:
    with database.begin() as connection:
        return classes.load(connection, settings)


def check(database: Database, settings: Settings, *pairs: tuple[Mode, str]) -> None:
    with database.begin() as connection:
        classes.check(connection, settings, pairs)


def test_standard_takes_from_the_settings_what_nobody_has_set(database: Database, settings: Settings) -> None:
    found = offers(database, settings)
    assert list(found) == ["standard"]
    standard = found["standard"]
    assert (standard.ephemeral_capacity, standard.pool_min, standard.pool_max, standard.pool_slots) == (7, 2, 2, 3)
    assert (standard.ephemeral_provider, standard.persistent_provider) == ("process", "process")
    assert standard.pool_cooldown_s == settings.pool_cooldown_s
    assert (standard.cpus, standard.memory_bytes, standard.gpus, standard.architecture) == (None, None, 0, None)


def test_another_class_offers_nothing_until_somebody_says_what(database: Database, settings: Settings) -> None:
    classes.set_class(database, "gpu", gpus=1)
    gpu = offers(database, settings)["gpu"]
    assert (gpu.gpus, gpu.ephemeral_capacity, gpu.pool_min, gpu.pool_max, gpu.pool_slots) == (1, 0, 0, 0, 3)
    classes.set_class(database, "gpu", ephemeral_capacity=4, ephemeral_provider="docker", architecture="arm64")
    gpu = offers(database, settings)["gpu"]
    assert (gpu.gpus, gpu.ephemeral_capacity, gpu.ephemeral_provider, gpu.architecture) == (1, 4, "docker", "arm64")


_IMPOSSIBLE: list[dict[str, Any]] = [
    {"ephemeral_capacity": -1},
    {"pool_min": -1},
    {"pool_min": 3, "pool_max": 2},
    {"pool_slots": 0},
    {"cpus": 0},
    {"cpus": float("nan")},
    {"cpus": float("inf")},
    {"memory_bytes": -5},
    {"pool_max": 2.5},
    {"pool_max": 10**12},
    {"gpus": -1},
    {"pool_cooldown_s": -0.1},
    {"architecture": "sparc"},
    {"ephemeral_provider": "static"},
    {"persistent_provider": "moon"},
    {"cpu": 4},
    {"class_name": "other"},
]


def test_an_impossible_value_changes_nothing(database: Database, settings: Settings) -> None:
    classes.set_class(database, "big", cpus=16)
    before = offers(database, settings)
    for change in _IMPOSSIBLE:
        with pytest.raises(LimitInvalid, match="nothing was changed"):
            classes.set_class(database, "big", **({"gpus": 2} | change))
        with pytest.raises(LimitInvalid):
            classes.set_class(database, "brand-new", **({"gpus": 2} | change))
    assert offers(database, settings) == before
    assert [kind for kind, _ in facts(database)] == ["class.set"]


def test_a_class_name_must_fit_into_a_queues_name(database: Database) -> None:
    for name in ("", "GPU", "a.b", "a:b", "-x", "x" * 42, "a b"):
        with pytest.raises(LimitInvalid, match="class name"):
            classes.set_class(database, name, gpus=1)


def test_an_unknown_class_or_one_without_capacity_is_refused(database: Database, settings: Settings) -> None:
    classes.set_class(database, "gpu", ephemeral_capacity=1)
    check(database, settings, (Mode.EPHEMERAL, "gpu"), (Mode.AUTO, "gpu"), (Mode.PERSISTENT, "standard"))
    with pytest.raises(SpecInvalid, match=r"among gpu, standard, found 'tpu'; try `megaflow classes set tpu"):
        check(database, settings, (Mode.EPHEMERAL, "standard"), (Mode.AUTO, "tpu"))
    with pytest.raises(SpecInvalid, match=r"capacity for mode persistent, found none; try .*--pool-max N"):
        check(database, settings, (Mode.PERSISTENT, "gpu"))
    classes.set_class(database, "gpu", ephemeral_capacity=0)
    with pytest.raises(SpecInvalid, match="capacity for mode auto"):
        check(database, settings, (Mode.AUTO, "gpu"))


def test_a_task_larger_than_a_place_is_refused_with_the_classes_that_are_large_enough(
    database: Database, settings: Settings
) -> None:
    classes.set_class(database, "standard", memory_bytes=6 << 30, cpus=6.0)
    classes.set_class(database, "large", memory_bytes=16 << 30, ephemeral_capacity=1, pool_max=0)

    def sizes(memory_bytes: int, mode: Mode) -> None:
        spec = a_spec(mode=mode)
        environment = spec.task.environment.model_copy(update={"resources": Resources(memory_bytes=memory_bytes)})
        task = spec.task.model_copy(update={"environment": environment})
        with database.begin() as connection:
            classes.check_sizes(connection, settings, [spec.model_copy(update={"task": task})])

    sizes(6 << 30, Mode.EPHEMERAL)
    sizes(2 << 30, Mode.PERSISTENT)  # one of three slots
    said = r"'standard' has \(2 processors, 2048 MiB\), found 2 processors and 3072 MiB"
    with pytest.raises(SpecInvalid, match=said):
        sizes(3 << 30, Mode.PERSISTENT)
    with pytest.raises(SpecInvalid, match="try --class large"):
        sizes(8 << 30, Mode.EPHEMERAL)
    with pytest.raises(SpecInvalid, match="megaflow classes set standard --memory"):
        sizes(32 << 30, Mode.EPHEMERAL)


def test_a_standing_instance_that_somebody_else_started_is_capacity(database: Database, settings: Settings) -> None:
    classes.set_class(database, "standard", pool_max=0)
    with pytest.raises(SpecInvalid, match="capacity for mode persistent"):
        check(database, settings, (Mode.PERSISTENT, "standard"))
    an_instance(database, mode="persistent", provider="static", state="terminated")
    check(database, settings, (Mode.PERSISTENT, "standard"))


def test_a_class_in_use_cannot_be_removed(database: Database, settings: Settings) -> None:
    classes.set_class(database, "gpu", ephemeral_capacity=1)
    task_id = a_task(database, a_run(database), resource_class="gpu", state="failed")
    classes.remove_class(database, "gpu")  # what has ended is history
    classes.set_class(database, "gpu", ephemeral_capacity=1)
    write(database, "UPDATE tasks SET state = 'pending' WHERE id = :id", id=task_id)
    with pytest.raises(LimitInvalid, match=r"1 task\(s\).*0 live instance"):
        classes.remove_class(database, "gpu")
    write(database, "UPDATE tasks SET state = 'cancelled' WHERE id = :id", id=task_id)
    an_instance(database, resource_class="gpu", state="draining")
    with pytest.raises(LimitInvalid, match=r"0 task\(s\).*1 live instance"):
        classes.remove_class(database, "gpu")
    assert "gpu" in offers(database, settings)


def test_standard_stays_and_an_unknown_class_is_named(database: Database) -> None:
    for name, said in (("standard", "cannot be removed"), ("tpu", "unknown resource class 'tpu'; known: standard")):
        with pytest.raises(LimitInvalid, match=said):
            classes.remove_class(database, name)


def test_people_define_change_and_remove_a_class(megaflow: CommandLine) -> None:
    options = ("--cpus", "4", "--memory", "4GiB", "--gpus", "1", "--arch", "amd64", "--ephemeral", "3")
    said = megaflow("classes", "set", "gpu", *options, "--pool-max", "2", "--slots", "8", "--cooldown", "1.5")
    assert said == "class gpu: 3 ephemeral instance(s), pool of 0 to 2 with 8 slot(s) each\n"
    gpu, standard = megaflow.json("classes")
    assert (gpu["name"], gpu["cpus"], gpu["memory_bytes"], gpu["gpus"]) == ("gpu", 4, 4 << 30, 1)
    assert (gpu["architecture"], gpu["pool_cooldown_s"], standard["name"]) == ("amd64", 1.5, "standard")
    printed = megaflow("classes")
    for part in ("gpu", "4.0GiB", "amd64", "0 to 2", "standard"):
        assert part in printed
    assert megaflow.json("classes", "set", "gpu", "--memory", "default", "--arch", "default")["memory_bytes"] is None
    for wrong in (("--memory", "4 elephants"), ("--ephemeral", "many")):
        with pytest.raises(LimitInvalid):
            megaflow("classes", "set", "gpu", *wrong)
    assert megaflow("classes", "remove", "gpu") == "class gpu removed\n"
    assert [row["name"] for row in megaflow.json("classes")] == ["standard"]


@pytest.mark.parametrize(
    ("said", "meant"),
    [("4GiB", 4 << 30), ("1.5g", 1_500_000_000), ("512MB", 512_000_000), ("2048", 2048), ("1 kib", 1024)],
)
def test_sizes_are_read_as_people_write_them(said: str, meant: int) -> None:
    assert size_bytes(said) == meant
