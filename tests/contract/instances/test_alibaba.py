"""What Alibaba Cloud's provider does with the vendor's own refusals, before the server written by hand."""

from __future__ import annotations

import pytest

from app.errors import LaunchUnclear
from tests.contract.instances.alibaba_ground import AlibabaGround

pytestmark = pytest.mark.extra


def test_the_next_type_is_taken_and_the_token_is_the_same_for_the_same_way(alibaba_ground: AlibabaGround) -> None:
    ground = alibaba_ground
    ground.ecs.sold_out.add("ecs.c8a.2xlarge")
    (request,) = ground.requested()
    with ground.losing_replies(), pytest.raises(LaunchUnclear):
        ground.provider.launch([request])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ground.provider, "_find", lambda ids: {})  # not listed yet; the token in the user data is new
        with pytest.raises(LaunchUnclear, match="IdempotentParameterMismatch"):
            ground.provider.launch([request])
    types = [asked["InstanceType"] for asked in ground.ecs.launches]
    assert types == ["ecs.c8a.2xlarge", "ecs.c7.2xlarge", "ecs.c7.2xlarge"]
    assert ground.ecs.launches[1]["ClientToken"] == ground.ecs.launches[2]["ClientToken"]
    assert ground.made(request.instance_id) == 1
    assert ground.provider.launch([request]) == ground.provider.alive()
