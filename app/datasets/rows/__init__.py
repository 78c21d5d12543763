"""The rules of each dataset of rows, by name, and which of them a row can only be of."""

from __future__ import annotations

from collections.abc import Mapping

from app.datasets.base import Row, RowAdapter
from app.datasets.rows.multi_swe_bench import MultiSweBenchRows
from app.datasets.rows.own import OwnRows
from app.datasets.rows.swe_flow import SweFlowRows
from app.datasets.rows.swe_gym import SweGymRows
from app.datasets.rows.swe_rebench import SweRebenchRows
from app.datasets.rows.swe_rebench_v2 import SweRebenchV2Rows
from app.datasets.rows.swe_smith import SweSmithRows
from app.datasets.rows.swebench import SweBenchRows
from app.datasets.rows.swebench_live import SweBenchLiveRows
from app.datasets.rows.swebench_pro import SweBenchProRows

__all__ = ["ADAPTERS", "adapter_of"]

_SWE_BENCH, _MULTI = SweBenchRows(), MultiSweBenchRows()
ADAPTERS: Mapping[str, RowAdapter] = {
    "swe-bench": _SWE_BENCH,  # Lite and Verified, too
    "swe-bench-multilingual": _SWE_BENCH,
    "swe-gym": SweGymRows(),
    "swe-rebench": SweRebenchRows(),
    "swe-rebench-v2": SweRebenchV2Rows(),
    "swe-smith": SweSmithRows(),
    "multi-swe-bench": _MULTI,
    "multi-swe-rl": _MULTI,
    "swe-bench-live": SweBenchLiveRows(),  # and MultiLang
    "swe-flow": SweFlowRows(),
    "swe-bench-pro": SweBenchProRows(),
    "own": OwnRows(),
}


def adapter_of(row: Row) -> RowAdapter:
    """The only rules that recognise the row.

    Raises: DatasetInvalid: none do, or several; says how to name the dataset.
    """
    found = {adapter.name: adapter for adapter in ADAPTERS.values() if adapter.recognises(row.values)}
    if len(found) == 1:
        return next(iter(found.values()))
    columns = ", ".join(sorted(str(column) for column in row.values)[:20])
    raise row.place.fault(
        "(all of it)",
        f"columns of one dataset; say whose rows they are, for example swe-gym=PATH (known: {', '.join(ADAPTERS)})",
        f"columns of {' and '.join(sorted(found))}" if found else f"columns {columns}",
    )
