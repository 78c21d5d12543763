"""What a cloud's machine is told to do at its first boot, and what it costs."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from uuid import UUID

import pytest

from app.errors import InstanceFailed, SettingsInvalid
from app.instances.cloud import boot_script
from app.instances.prices import hourly_usd, instance_usd
from app.models.instance import InstanceMode, InstanceRequest
from app.settings import Settings

ECR = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/megaflow/worker:1"
REQUEST = InstanceRequest(instance_id=UUID(int=7), mode=InstanceMode.EPHEMERAL, lifetime_s=61.0)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, web_url="https://megaflow.example.org", worker_image="registry.example/worker:2")


def test_the_last_command_joins_as_this_very_instance(settings: Settings) -> None:
    script = boot_script(settings, REQUEST, "mfj_once")
    assert "ecr" not in script  # the image is elsewhere
    words = shlex.split(script.splitlines()[-1])
    assert words[:2] == ["docker", "run"]
    join = words[words.index("registry.example/worker:2") + 1 :]
    assert join[:6] == ["megaflow", "worker", "join", "https://megaflow.example.org", "--token", "mfj_once"]
    assert json.loads(join[join.index("--instance") + 1])["instance_id"] == str(REQUEST.instance_id)


def test_the_machine_ends_itself_after_its_lifetime_and_when_its_worker_leaves(settings: Settings) -> None:
    lines = boot_script(settings, REQUEST, "t").splitlines()
    assert "shutdown -P +2" in lines  # of 61 seconds, in whole minutes
    assert "trap 'shutdown -P now' EXIT" in lines
    standing = REQUEST.model_copy(update={"lifetime_s": None})
    assert "shutdown -P +" not in boot_script(settings, standing, "t")


def test_what_stands_in_it_is_a_script_that_runs_to_its_end(settings: Settings, tmp_path: Path) -> None:
    for name in ("shutdown", "docker", "aws", "mkdir"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/told\n')
        (tmp_path / name).chmod(0o755)
    script = boot_script(settings.model_copy(update={"worker_image": ECR}), REQUEST, "mfj_once")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert subprocess.run(["sh"], input=script.encode(), env=environment, timeout=60).returncode == 0
    told = (tmp_path / "told").read_text().splitlines()
    assert told[0] == "shutdown -P +2"
    assert "aws ecr get-login-password --region eu-west-1" in told
    assert "docker login --username AWS --password-stdin 123456789012.dkr.ecr.eu-west-1.amazonaws.com" in told
    assert f"docker pull --quiet {ECR}" in told
    assert told[-2].startswith("docker run")
    assert told[-1] == "shutdown -P now"


def test_machines_need_a_url(settings: Settings) -> None:
    with pytest.raises(InstanceFailed, match="set MEGAFLOW_WEB_URL"):
        boot_script(settings.model_copy(update={"web_url": None}), REQUEST, "t")


def test_the_price_of_a_family_grows_with_the_size(settings: Settings) -> None:
    for machine, usd in {"c7i.large": 0.08925, "c7i.xlarge": 0.1785, "c7a.2xlarge": 0.41056}.items():
        assert hourly_usd(settings, "ec2", machine) == pytest.approx(usd)
    assert hourly_usd(settings, "ec2", "c7a.2xlarge", spot=True) == pytest.approx(0.41056 * 0.4)
    for unknown in ("c7i.metal-24xl", "x1.large", "c7i", ""):
        assert hourly_usd(settings, "ec2", unknown) is None


def test_an_instance_costs_what_its_class_is_given(settings: Settings) -> None:
    types = ("large=c7i.8xlarge", "c7i.2xlarge")
    own = settings.model_copy(update={"ec2_types": types, "ec2_spot": True})
    assert instance_usd(own, "ec2", "large") == pytest.approx(0.08925 * 16 * 0.4)
    assert instance_usd(own, "ec2", "standard") == pytest.approx(0.08925 * 4 * 0.4)
    assert instance_usd(settings, "ec2", "standard") is None  # the template's type
    assert instance_usd(own, "process", "standard") is None


def test_the_file_of_the_settings_goes_first(settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text("ec2: {spot: 0.5, types: {c7i.2xlarge: 0.3}}\nalibaba: {types: {ecs.c8a.2xlarge: 0.25}}\n")
    own = settings.model_copy(update={"instance_prices": file})
    assert hourly_usd(own, "ec2", "c7i.2xlarge", spot=True) == pytest.approx(0.15)
    assert hourly_usd(own, "ec2", "c7a.2xlarge") == pytest.approx(0.41056)  # in the committed table alone
    assert hourly_usd(own, "alibaba", "ecs.c8a.2xlarge") == pytest.approx(0.25)
    file.write_text("ec2: {types: cheap}")
    with pytest.raises(SettingsInvalid, match="MEGAFLOW_INSTANCE_PRICES"):
        hourly_usd(own, "ec2", "c7i.2xlarge")
