"""Cases of which `make test` runs some and `make test-extra` the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest
from _pytest.mark.structures import ParameterSet


def params(cases: Iterable[str], often: Collection[str]) -> list[ParameterSet]:
    """All cases for pytest: those of `often` run in `make test`, the others in `make test-extra`."""
    cases = tuple(cases)
    assert not set(often) - set(cases)
    extra = (pytest.mark.extra,)
    return [pytest.param(one, marks=() if one in often else extra, id=one.replace(" ", "-")) for one in cases]
