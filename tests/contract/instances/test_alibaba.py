"""What Alibaba Cloud's provider does with the vendor's own refusals, before the server written by hand."""

from __future__ import annotations

import pytest

from app.errors import LaunchUnclear
from tests.contract.instances.alibaba_fixture import AlibabaFixture

pytestmark = pytest.mark.extra


def test_the_next_type_is_taken_and_the_token_is_the_same_for_the_same_way(alibaba_fixture: AlibabaFixture) -> None:
    fixture = alibaba_fixture
    fixture.ecs.sold_out.add("ecs.c8a.2xlarge")
    (request,) = fixture.requested()
    with fixture.losing_replies(), pytest.raises(LaunchUnclear):
        fixture.provider.launch([request])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixture.provider, "_find", lambda ids: {})  # not listed yet; the token in the user data is new
        with pytest.raises(LaunchUnclear, match="IdempotentParameterMismatch"):
            fixture.provider.launch([request])
    types = [asked["InstanceType"] for asked in fixture.ecs.launches]
    assert types == ["ecs.c8a.2xlarge", "ecs.c7.2xlarge", "ecs.c7.2xlarge"]
    assert fixture.ecs.launches[1]["ClientToken"] == fixture.ecs.launches[2]["ClientToken"]
    assert fixture.made(request.instance_id) == 1
    assert fixture.provider.launch([request]) == fixture.provider.alive()
