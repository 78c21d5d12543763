"""Lists the rules of each dataset of rows, by name."""

from __future__ import annotations

from collections.abc import Mapping

from app.datasets.base import RowAdapter
from app.datasets.rows.multi_swe_bench import MultiSweBenchRows
from app.datasets.rows.own import OwnRows
from app.datasets.rows.swe_flow import SweFlowRows
from app.datasets.rows.swe_gym import SweGymRows
from app.datasets.rows.swe_rebench import SweRebenchRows, SweRebenchV2Rows
from app.datasets.rows.swe_smith import SweSmithRows
from app.datasets.rows.swebench import SweBenchRows
from app.datasets.rows.swebench_live import SweBenchLiveRows
from app.datasets.rows.swebench_pro import SweBenchProRows

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
