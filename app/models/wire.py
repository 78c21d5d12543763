"""Defines the base class of data sent between processes."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Wire(BaseModel):
    """Base of data sent between processes: frozen; refuses unknown keys and numbers that JSON cannot express."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
