"""Defines the base class of data sent between processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from app.errors import LimitInvalid


class Wire(BaseModel):
    """Base of data sent between processes: frozen; refuses unknown keys and numbers that JSON cannot express."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Setting = TypeVar("Setting", bound=Wire)


def checked(model: type[Setting], values: Mapping[str, Any], what: str) -> Setting:
    """Returns an administrator's values as the model has them. Raises: LimitInvalid: names the first wrong one."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise LimitInvalid(f"{what}: {name}: {first['msg']}, found {first['input']!r}; nothing was changed") from None
