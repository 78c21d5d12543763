"""What Alibaba Cloud's provider does with the vendor's own refusals, before the server written by hand."""

from __future__ import annotations

import pytest

from app.errors import InstanceFailed, LaunchUnclear
from app.instances.cloud import Throttled
from tests.contract.instances.alibaba_ground import AlibabaGround
from tests.contract.instances.alibaba_server import Refusal

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


def test_lists_of_several_pages_are_whole(alibaba_ground: AlibabaGround) -> None:
    handles = alibaba_ground.provider.launch(alibaba_ground.requested(9))
    assert len(handles) == 9
    fresh = type(alibaba_ground.provider)(alibaba_ground.settings)  # type: ignore[call-arg]
    assert fresh.alive() == handles


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [("Throttling.User", 400, Throttled), ("InvalidSecurityToken.Expired", 403, InstanceFailed)],
)
def test_refusals_make_nothing(
    alibaba_ground: AlibabaGround, code: str, status: int, kind: type[InstanceFailed]
) -> None:
    alibaba_ground.ecs.refuse["RunInstances"] = Refusal(status, code)
    with pytest.raises(kind, match=code):
        alibaba_ground.provider.launch(alibaba_ground.requested(3))
    assert alibaba_ground.left() == []
    alibaba_ground.ecs.refuse.clear()
    assert len(alibaba_ground.provider.launch(alibaba_ground.requested(1))) == 1
