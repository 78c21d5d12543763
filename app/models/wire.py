"""Base of what crosses a process."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Wire(BaseModel):
    """Base of what crosses a process: frozen; unknown keys, and numbers that JSON has no word for, are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
