"""Computes what a call costs: the user's table, else the provider's list, else unknown.

Unknown is None and never 0: only its owner knows what a self-hosted engine costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from app.errors import SettingsInvalid
from app.models.model_calls import TokenUse

_MILLION = 1_000_000


_Dollars = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class Price:
    """Price in US dollars per million tokens. None: the same as for the rest of the prompt."""

    prompt: _Dollars
    completion: _Dollars
    cached: _Dollars | None = None  # read from the engine's cache
    stored: _Dollars | None = None  # written to it

    def of(self, use: TokenUse) -> float | None:
        """Returns US dollars. None: the engine did not report its tokens."""
        if not self.prompt and not self.completion and not self.cached and not self.stored:
            return 0.0
        if use.prompt is None or use.completion is None:
            return None
        cached, stored = use.cached or 0, use.stored or 0
        fresh = max(use.prompt - cached - stored, 0)
        total = fresh * self.prompt + use.completion * self.completion
        total += cached * (self.prompt if self.cached is None else self.cached)
        total += stored * (self.prompt if self.stored is None else self.stored)
        return total / _MILLION


_PRICES = TypeAdapter(dict[str, Price])


class Prices:
    """Prices of the user's table and of the providers' lists."""

    def __init__(self, own: Mapping[str, Price] | None = None) -> None:
        self._own = dict(own or {})
        self._unlisted: set[tuple[str, str]] = set()

    @classmethod
    def read(cls, path: Path | None) -> Prices:
        """Reads a YAML file (`Settings.model_prices`): by model, which may end in `*`, `prompt` and `completion`, and
        optionally `cached` and `stored`, in US dollars per million tokens.

        Raises: SettingsInvalid.
        """
        if path is None:
            return cls()
        try:
            table = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise SettingsInvalid(f"MEGAFLOW_MODEL_PRICES: expected a YAML file at {path}; found: {error}") from error
        if not isinstance(table, dict):
            raise SettingsInvalid(f"{path}: expected prices by model; found {type(table).__name__}")
        try:
            return cls(_PRICES.validate_python({str(model): price for model, price in table.items()}))
        except ValidationError as error:
            expected = "expected prompt and completion, perhaps cached and stored, in US dollars per million tokens"
            problems = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            raise SettingsInvalid(f"{path}: {expected}; found {problems}") from error

    def cost(
        self, use: TokenUse, *, model: str, upstream_model: str = "", url: str = "", built_in: bool = False
    ) -> float | None:
        """Returns the US dollars of a call. None: unknown.

        model: the name in the request, upstream_model: the name at the engine at `url`. Either may be in the user's
        table. A provider's list counts only if that provider answered. Answers of MegaFlow's own engine (`built_in`)
        are free, unless the user's table has a price. A name alone, which the agent can choose, makes nothing free.
        """
        names = [name for name in (model, upstream_model) if name]
        if (price := self._own_price(names)) is not None:
            return price.of(use)
        if built_in:
            return 0.0
        return self._list_price(use, upstream_model or model, url)

    def _own_price(self, names: list[str]) -> Price | None:
        for name in names:
            if name in self._own:
                return self._own[name]
        fitting = [known for known in self._own if "*" in known and any(fnmatchcase(name, known) for name in names)]
        return self._own[max(fitting, key=len)] if fitting else None

    def _list_price(self, use: TokenUse, model: str, url: str) -> float | None:
        if not url or (url, model) in self._unlisted or use.prompt is None or use.completion is None:
            return None
        import genai_prices  # takes half a second; `warm` does it in another thread

        usage = genai_prices.Usage(
            input_tokens=use.prompt,
            output_tokens=use.completion,
            cache_read_tokens=use.cached,
            cache_write_tokens=use.stored,
        )
        try:
            return float(genai_prices.calc_price(usage, model, provider_api_url=url).total_price)
        except LookupError:
            self._unlisted.add((url, model))
            return None
        except ValueError:  # counts that contradict each other
            return None

    @staticmethod
    def warm() -> None:
        """Loads the providers' lists, so that the first call need not wait for them. Callable from any thread."""
        import genai_prices  # noqa: F401
