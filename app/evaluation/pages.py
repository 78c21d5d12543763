"""Writes a report as one self-contained HTML file: no script, no address, all text escaped. No I/O."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from html import escape

from app.evaluation.report import Report, Slice, causes_of
from app.evaluation.statistics import Rate
from app.evaluation.transcripts import TranscriptReport
from app.texts import grading_cost

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1f24;background:#fff}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}.big{font-size:2.2rem;font-weight:600}
table{border-collapse:collapse;width:100%;display:block;overflow-x:auto}pre{overflow-x:auto}
td,th{padding:.3rem .6rem;text-align:left;border-bottom:1px solid #d8dee4}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}li,p{overflow-wrap:anywhere}.note{color:#57606a}svg{vertical-align:middle}
@media(prefers-color-scheme:dark){body{color:#e6edf3;background:#0d1117}td,th{border-color:#30363d}.note{color:#9da7b1}}
"""
STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
"""Hash of the page's style, for a content security policy."""
_APART = "Agents that say something about tasks and not about a model (oracle, nop, …) are counted apart, below."
_HEADERS = (
    "part",
    "solved",
    "of scored",
    "pass rate",
    "95 % interval",
    "from 0 to 100 %",
    "not scored",
    "suspect",
    "cost per solved",
    "grading",
)


def html_page(report: Report, transcripts: TranscriptReport | None = None) -> str:
    """Returns the whole page, with the findings of the transcript checks, if they were made."""
    agents = report.by["agent"]
    several = len(agents) > 1
    rates = ", ".join(f"{one.name} {_percent(one.rate)}" if several else _percent(one.rate) for one in agents)
    body = [
        f"<h1>{escape(report.run)}</h1>",
        f'<p class="note">run {escape(report.run_id)}, {report.created_at:%Y-%m-%d %H:%M} UTC</p>',
        *(_headline(part, part.name if several else "") for part in agents or [report.headline]),
        _list((*report.notes, *([_APART] if report.baselines and not agents else []))),
        _table("Agents" if several else "All", [*(agents if several else [report.headline]), *report.baselines]),
        *(_table(f"By {name}", parts) for name, parts in report.by.items() if len(parts) > 1 and name != "agent"),
        *(_pass_at(part, f": {part.name}" if several else "") for part in agents),
        _flaky(report),
        _transcripts(transcripts),
        "<h2>What the figures depend on</h2>",
        *(f"<h3>{escape(name)}</h3>{_list(values)}" for name, values in report.versions.items()),
    ]
    if report.provenance is not None:
        provenance = json.dumps(report.provenance, indent=2, ensure_ascii=False)
        body.append(f"<h3>datasets</h3><pre tabindex='0'>{escape(provenance)}</pre>")
    title = escape(f"{report.run}: {rates or _percent(None)}")
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    return (
        f'<!doctype html><html lang="en"><head>{head}<title>{title}</title><style>{_STYLE}</style></head>'
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _headline(part: Slice, name: str) -> str:
    """Returns one agent's pass rate. name: the agent's, if there are several."""
    lost = f"; not scored: {escape(causes_of(part))}" if part.lost else ""
    return (
        f"<p>{escape(name)} <span class='big'>{_percent(part.rate)}</span> {escape(_interval(part.rate))}</p>"
        f"<p>{part.solved} solved of {part.scored} scored, of {part.total} tasks{lost}</p>"
    )


def _table(title: str, parts: Iterable[Slice]) -> str:
    head = "".join(f'<th class="{"n" if index else ""}">{name}</th>' for index, name in enumerate(_HEADERS))
    return f"<h2>{escape(title)}</h2><table tabindex='0'><tr>{head}</tr>{''.join(_row(part) for part in parts)}</table>"


def _row(part: Slice) -> str:
    cells = (
        part.solved,
        part.scored,
        _percent(part.rate),
        escape(_interval(part.rate)),
        _bar(part.rate),
        sum(part.lost.values()) or "",
        part.suspect or "",
        "" if part.cost_per_solved_usd is None else f"${part.cost_per_solved_usd:.2f}",
        grading_cost(part.grading_s, part.grading_usd),
    )
    columns = "".join(f'<td class="n">{cell}</td>' for cell in cells)
    return f"<tr><td>{escape(part.name)}</td>{columns}</tr>"


def _bar(rate: Rate | None) -> str:
    """Draws the interval as a line on a scale from 0 to 1, with the rate as a dot."""
    if rate is None:
        return ""
    low, high, value = (round(100 * one, 1) for one in (rate.low, rate.high, rate.value))
    return (
        f'<svg width="104" height="12" role="img" aria-label="{low} to {high} percent"><g transform="translate(2 6)">'
        '<path d="M0 0H100" stroke="#d0d7de"/>'
        f'<path d="M{low} 0H{high}" stroke="#0969da" stroke-width="3"/><circle cx="{value}" r="4" fill="#0969da"/>'
        "</g></svg>"
    )


def _pass_at(part: Slice, of: str) -> str:
    if len(part.pass_at) < 2:
        return ""
    rows = "".join(
        f'<tr><td>{k}</td><td class="n">{100 * part.pass_at[k]:.1f} %</td>'
        f'<td class="n">{100 * part.pass_hat.get(k, 0.0):.1f} %</td></tr>'
        for k in sorted(part.pass_at)
    )
    head = '<tr><th>k</th><th class="n">pass@k: at least one of k</th><th class="n">pass^k: all of k</th></tr>'
    return f"<h2>Replicas{escape(of)}</h2><table tabindex='0'>{head}{rows}</table>"


def _flaky(report: Report) -> str:
    rows = "".join(
        f"<tr><td>{escape(t)}</td><td>{escape(', '.join(names))}</td></tr>" for t, names in report.flaky.items()
    )
    head = "<tr><th>task</th><th>tests whose outcome differed between runs of one solution</th></tr>"
    return f"<h2>Flaky tests</h2><table tabindex='0'>{head}{rows}</table>" if rows else ""


def _transcripts(found: TranscriptReport | None) -> str:
    if found is None:
        return ""
    rows = "".join(
        f"<tr><td>{escape(one.name)}</td><td>{escape(finding.rule)}</td>"
        f'<td class="n">{finding.step}</td><td><code>{escape(finding.excerpt)}</code></td></tr>'
        for one in found.tasks
        for finding in one.findings
    )
    summary = f"{found.checked} checked by rules, findings in {len(found.tasks)}; {found.without} tasks have none"
    summary += f"; {found.passed_over} were not read" if found.passed_over else ""
    head = '<tr><th>task</th><th>rule</th><th class="n">step</th><th>what the agent did</th></tr>'
    table = f"<table tabindex='0'>{head}{rows}</table>"
    return f"<h2>Transcripts</h2><p>{summary}</p>{table if rows else ''}"


def _list(values: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(value)}</li>" for value in values)
    return f"<ul>{items}</ul>" if items else ""


def _percent(rate: Rate | None) -> str:
    return "not scored" if rate is None else f"{100 * rate.value:.1f} %"


def _interval(rate: Rate | None) -> str:
    return "" if rate is None else f"{100 * rate.low:.1f} to {100 * rate.high:.1f} % ({rate.method})"
