"""Reads EventBridge's envelopes of EC2: a machine's new state, and the warning before a spot machine is taken back."""

from __future__ import annotations

from typing import Literal

import structlog
from pydantic import BaseModel, Field, ValidationError

log = structlog.get_logger()

STATES = "EC2 Instance State-change Notification"
SPOT = "EC2 Spot Instance Interruption Warning"

_GONE = frozenset({"shutting-down", "terminated", "stopping", "stopped"})


class _EventDetail(BaseModel):
    handle: str = Field(alias="instance-id")
    state: str = ""


class _EventEnvelope(BaseModel):
    source: Literal["aws.ec2"]
    kind: Literal["EC2 Instance State-change Notification", "EC2 Spot Instance Interruption Warning"] = Field(
        alias="detail-type"
    )
    detail: _EventDetail


class MachineNotice(BaseModel):
    """What was told of a machine."""

    handle: str
    state: str
    warning: bool

    @property
    def ended(self) -> bool:
        return self.state in _GONE


def read_notice(body: str) -> MachineNotice | None:
    """None: it is about something else, and of no use here."""
    try:
        found = _EventEnvelope.model_validate_json(body)
    except ValidationError as error:
        log.debug("instance.event_unknown", error=str(error))
        return None
    return MachineNotice(handle=found.detail.handle, state=found.detail.state, warning=found.kind == SPOT)
