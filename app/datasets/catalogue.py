"""Lists the datasets known by name: their locations, the rules that read them, and their terms.

Facts as published; none of the addresses was contacted from where this was written. The number of rows is what the
authors state, and is never compared with the rows read: live datasets grow.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from app.errors import UnknownName

MULTI_SWE_LANGUAGES = ("java", "ts", "js", "go", "rust", "c", "cpp")
"""Folders of Multi-SWE-bench's languages. Its folder `python` is a copy of SWE-bench Verified and is left out."""
_LIVE_LANGUAGES = ("c", "cpp", "go", "js", "rust", "java", "ts", "cs")


@dataclass(frozen=True, slots=True)
class GitFolder:
    """A folder of task folders at one commit of a public repository."""

    url: str  # https
    commit: str
    folder: str = "."


@dataclass(frozen=True, slots=True)
class KnownDataset:
    """A dataset, by the name that a submission uses."""

    name: str
    adapter: str  # of `app.datasets.rows.ADAPTERS`, or the name of a format of task folders
    source: str  # the source of these facts
    licence: str  # of the rows; the repositories' code has its own licences
    citation: str
    hub_id: str | None = None  # None: it is on no hub
    split: str = "test"
    files: tuple[str, ...] = ()  # patterns of its files, when they are not named after the split
    rows: int | None = None  # as its authors state
    language: str | None = None  # of every row, when no column says it
    path_languages: tuple[str, ...] = ()  # languages given by a folder, or the start of a file's name
    versions: tuple[tuple[str, GitFolder], ...] = ()  # of task folders in git, the default first

    def patterns(self) -> tuple[str, ...]:
        """Returns patterns of the split's files, named as the hub's loader does: `data/test-00000-of-00001.parquet`."""
        ends = (f"{self.split}-*.parquet", f"{self.split}.parquet", f"{self.split}.jsonl")
        return self.files or tuple(f"{folder}{end}" for end in ends for folder in ("data/", ""))

    def version(self, wanted: str | None) -> tuple[str, GitFolder]:
        """Returns the requested version; without a request, the first. Raises: UnknownName."""
        known = dict(self.versions)
        name = wanted or next(iter(known))
        if name not in known:
            raise UnknownName.of(f"version of dataset {self.name}", name, list(known))
        return name, known[name]


_CARD = "the dataset's card on the hub"
_LAUDE = "https://github.com/laude-institute"
_NOT_STATED = "not stated on the card; code MIT"
_SWE_BENCH: dict[str, Any] = {
    "adapter": "swe-bench",
    "language": "python",
    "licence": _NOT_STATED,
    "citation": "Jimenez et al., SWE-bench, arXiv 2310.06770",
    "source": _CARD,
}
_SWE_GYM: dict[str, Any] = {
    "language": "python",
    "licence": "MIT",
    "adapter": "swe-gym",
    "split": "train",
    "citation": "Pan et al., SWE-Gym, arXiv 2412.21139",
    "source": "github SWE-Gym/SWE-Gym, README; OpenHands' evaluation documents",
}
_SWE_SMITH: dict[str, Any] = {
    "adapter": "swe-smith",
    "split": "train",
    "licence": "MIT",
    "citation": "Yang et al., SWE-smith, arXiv 2504.21798",
    "source": "github SWE-bench/SWE-smith, README; swesmith 0.0.9",
}
_MULTI_SWE: dict[str, Any] = {
    "adapter": "multi-swe-bench",
    "licence": "CC0-1.0",
    "citation": "Zan et al., Multi-SWE-bench, arXiv 2504.02605",
    "source": "github multi-swe-bench/multi-swe-bench, README",
}
_LIVE: dict[str, Any] = {
    "adapter": "swe-bench-live",
    "licence": "MIT",
    "citation": "Zhang et al., SWE-bench-Live, arXiv 2505.23419",
    "source": "github microsoft/SWE-bench-Live, README",
}

_DATASETS = (
    KnownDataset("swe-bench", **_SWE_BENCH, hub_id="SWE-bench/SWE-bench", rows=2294),
    KnownDataset("swe-bench-lite", **_SWE_BENCH, hub_id="SWE-bench/SWE-bench_Lite", rows=300),
    KnownDataset(
        "swe-bench-verified",
        **_SWE_BENCH | {"citation": f"{_SWE_BENCH['citation']}; OpenAI, Introducing SWE-bench Verified, 2024"},
        hub_id="SWE-bench/SWE-bench_Verified",
        rows=500,
    ),
    KnownDataset(
        "swe-bench-multilingual",
        adapter="swe-bench-multilingual",
        hub_id="SWE-bench/SWE-bench_Multilingual",
        rows=300,
        licence="MIT",
        citation="Yang et al., SWE-smith, arXiv 2504.21798 (appendix)",
        source=_CARD,
    ),
    KnownDataset("swe-gym", **_SWE_GYM, hub_id="SWE-Gym/SWE-Gym", rows=2438),
    KnownDataset("swe-gym-lite", **_SWE_GYM, hub_id="SWE-Gym/SWE-Gym-Lite", rows=230),
    KnownDataset(
        "swe-rebench",
        adapter="swe-rebench",
        hub_id="nebius/SWE-rebench",
        split="filtered",  # the rows that have an image; `test` holds all
        rows=6542,
        language="python",
        licence="CC-BY-4.0",
        citation="Badertdinov et al., SWE-rebench, arXiv 2505.20411",
        source=_CARD,
    ),
    KnownDataset(
        "swe-rebench-v2",
        adapter="swe-rebench-v2",
        hub_id="nebius/SWE-rebench-V2",
        split="train",
        rows=32_079,
        licence="CC-BY-4.0",
        citation="Badertdinov et al., SWE-rebench V2, 2026",
        source=_CARD,
    ),
    KnownDataset("swe-smith", **_SWE_SMITH, hub_id="SWE-bench/SWE-smith"),
    KnownDataset("swe-smith-py", **_SWE_SMITH, hub_id="SWE-bench/SWE-smith-py", language="python"),
    KnownDataset(
        "multi-swe-bench",
        **_MULTI_SWE | {"source": f"{_MULTI_SWE['source']}; multi-swe-bench 1.1.2"},
        hub_id="ByteDance-Seed/Multi-SWE-bench",
        files=tuple(f"{language}/*.jsonl" for language in MULTI_SWE_LANGUAGES),
        path_languages=MULTI_SWE_LANGUAGES,
        rows=1632,
    ),
    *(
        KnownDataset(
            f"multi-swe-bench-{kind}",
            **_MULTI_SWE,
            hub_id=f"ByteDance-Seed/Multi-SWE-bench{sign}{kind}",
            files=(f"multi_swe_bench_{kind}.jsonl",),
            rows=rows,
        )
        for kind, sign, rows in (("mini", "_", 400), ("flash", "-", 300))
    ),
    KnownDataset(
        "multi-swe-rl",
        **_MULTI_SWE | {"adapter": "multi-swe-rl", "licence": "CC0-1.0 on its card, `other` in the hub's tag"},
        hub_id="ByteDance-Seed/Multi-SWE-RL",
        split="data_20240601_20250331",  # a batch, one folder of the repository
        files=("data_20240601_20250331/*_dataset.jsonl", "data_20240601_20250331/*/*_dataset.jsonl"),
        path_languages=MULTI_SWE_LANGUAGES,
        rows=4723,
    ),
    KnownDataset("swe-bench-live", **_LIVE, hub_id="SWE-bench-Live/SWE-bench-Live", split="full", language="python"),
    KnownDataset(
        "swe-bench-live-lite",
        **_LIVE,
        hub_id="SWE-bench-Live/SWE-bench-Live",
        split="lite",
        rows=300,
        language="python",
    ),
    KnownDataset(
        "swe-bench-live-multilang",
        **_LIVE,
        hub_id="SWE-bench-Live/MultiLang",
        split="c … cs",  # one split for each language
        files=tuple(f"data/{language}-*.parquet" for language in _LIVE_LANGUAGES),
        path_languages=_LIVE_LANGUAGES,
    ),
    KnownDataset(
        "swe-flow",
        adapter="swe-flow",
        rows=2020,
        language="python",
        licence="not known",
        citation="Zhang et al., SWE-Flow, arXiv 2506.09003",
        source="github Hambaobao/SWE-Flow-Bench: its data is a file beside the code",
    ),
    KnownDataset(
        "swe-bench-pro",
        adapter="swe-bench-pro",
        hub_id="ScaleAI/SWE-bench_Pro",
        rows=731,
        licence=_NOT_STATED,
        citation="Deng et al., SWE-Bench Pro, arXiv 2509.16941",
        source="github scaleapi/SWE-bench_Pro-os, README",
    ),
    KnownDataset(
        "terminal-bench",
        adapter="terminal-bench",
        rows=80,
        licence="Apache-2.0",
        citation="The Terminal-Bench team, Terminal-Bench, 2025",
        source="github laude-institute/terminal-bench, registry.json, terminal-bench-core 0.1.1",
        versions=(
            ("0.1.1", GitFolder(f"{_LAUDE}/terminal-bench.git", "91e10457b5410f16c44364da1a34cb6de8c488a5", "tasks")),
        ),
    ),
    KnownDataset(
        "terminal-bench-2",
        adapter="harbor",
        rows=89,
        licence="Apache-2.0",
        citation="The Terminal-Bench team, Terminal-Bench 2.0, 2025",
        source="Harbor's registry, terminal-bench 2.0",
        versions=(("2.0", GitFolder(f"{_LAUDE}/terminal-bench-2.git", "69671fbaac6d67a7ef0dfec016cc38a64ef7a77c")),),
    ),
)

CATALOGUE: dict[str, KnownDataset] = {one.name: one for one in _DATASETS}


def near(name: str) -> str:
    """Returns `did you mean …?`, or a pointer to the command that lists the names."""
    close = get_close_matches(name.lower(), CATALOGUE, n=1)
    return f"did you mean {close[0]}?" if close else "`megaflow dataset list` has the names"
