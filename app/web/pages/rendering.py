"""Renders templates: every shown text is escaped and cleaned; a value that is not known becomes "unknown"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.filters import do_filesizeformat
from markupsafe import Markup
from starlette.responses import HTMLResponse, Response

from app import texts
from app.texts import clean
from app.web.access import WebUser

UNKNOWN = "unknown"
_POLICY = (
    "default-src 'none'; script-src 'self'{script}; style-src 'self'{style}; img-src 'self' data:; font-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
POLICY = _POLICY.format(script="", style="")
SHELL_POLICY = _POLICY.format(script="", style=" 'unsafe-inline'")
"""Policy of the page with a live shell: the terminal draws with styles of its own."""
TERMINAL_POLICY = _POLICY.format(script=" 'wasm-unsafe-eval'", style=" 'unsafe-inline'")
"""Policy of the pages with a terminal: the player draws with its own styles and decodes in WebAssembly."""
_MOST_CHARACTERS = 20_000
"""Most characters of one text on a page; the artifact has all of it."""


@dataclass(frozen=True, slots=True)
class PageView:
    """A template with its values, status and headers."""

    template: str
    values: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


def render(view: PageView, caller: WebUser | None, web: Mapping[str, Any]) -> Response:
    """Renders the whole page. web: values of every page, such as links for administrators."""
    values = {**web, "me": caller, **view.values}
    text = _ENVIRONMENT.get_template(view.template).render(values)
    return HTMLResponse(text, status_code=view.status, headers=dict(view.headers))


def fragment(template: str, values: Mapping[str, Any]) -> str:
    """Renders a part of a page."""
    return _ENVIRONMENT.get_template(template).render(values)


def error_page(status: int, message: str) -> Response:
    """Returns the page of an error."""
    return render(PageView("error.html", {"status": status, "message": message}, status), None, {})


def _shown(value: Any) -> Any:
    """Returns a template's value as shown: None is unknown; text is cut, and has no control or direction characters."""
    if value is None:
        return UNKNOWN
    if isinstance(value, str) and not isinstance(value, Markup):
        if len(value) > _MOST_CHARACTERS:
            value = f"{value[:_MOST_CHARACTERS]}\n… {len(value) - _MOST_CHARACTERS:,} more characters"
        return clean(value)
    return value


def at(value: datetime | str | None) -> Markup | str:
    """Formats a time, as a `time` element."""
    if value is None:
        return UNKNOWN
    moment = datetime.fromisoformat(value) if isinstance(value, str) else value
    shown = moment.astimezone(UTC)
    return Markup('<time datetime="{}">{}</time>').format(shown.isoformat(), f"{shown:%Y-%m-%d %H:%M:%S}")


def lasted(seconds: float | None) -> str:
    """Formats a duration: `48s`, `3m12s`."""
    return UNKNOWN if seconds is None else texts.lasted(seconds)


def percent(share: float | None) -> str:
    """Formats a share of 1 as `66.7 %`."""
    return UNKNOWN if share is None else f"{100 * share:.1f} %"


def dollars(amount: float | None) -> str:
    """Formats dollars as `$0.0123`: four digits below a dollar, two above."""
    if amount is None:
        return UNKNOWN
    return f"${amount:,.2f}" if amount >= 1 or amount == 0 else f"${amount:.4f}"


def size(count: int | None) -> str:
    """Formats a number of bytes as `12.3 kB`."""
    return UNKNOWN if count is None else do_filesizeformat(count)


def reward(value: float | None) -> str:
    """Formats a reward, or `not scored`."""
    return "not scored" if value is None else f"{value:g}"


def whole(text: str) -> Markup:
    """Escapes a text that is already cut and cleaned, without another limit."""
    return Markup("{}").format(text)


def lines_of_diff(text: str) -> Markup:
    """Marks the added and removed lines of a diff."""
    kinds = {"+": "added", "-": "removed", "@": "hunk"}
    lines = (
        Markup('<span class="{}">{}</span>').format(kinds.get(line[:1], "same"), line)
        for line in clean(text)[:400_000].split("\n")
    )
    return Markup("\n").join(lines)


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parents[1] / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (at, lasted, percent, dollars, size, reward, whole, lines_of_diff)
    environment.filters.update({one.__name__: one for one in filters} | {"short": texts.short_id})
    return environment


_ENVIRONMENT = _environment()
