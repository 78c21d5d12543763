"""Finds hourly prices of machines: in the file of MEGAFLOW_INSTANCE_PRICES, then in the committed table."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import structlog
import yaml
from pydantic import Field, TypeAdapter, ValidationError

from app.errors import SettingsInvalid
from app.models.wire import Wire
from app.settings import Settings

log = structlog.get_logger()

_COMMITTED = Path(__file__).with_name("prices.yaml")
_SIZE = re.compile(r"(\d*)x?large")


class ProviderPrices(Wire):
    """Prices of one provider's types in USD per hour, on demand; of families, at their size `large`."""

    spot: float = Field(default=1.0, gt=0, le=1)
    types: dict[str, float] = {}
    families: dict[str, float] = {}

    def on_demand(self, machine: str) -> float | None:
        """Returns USD per hour; None: the machine is in no table."""
        family, _, size = machine.partition(".")
        if machine in self.types:
            return self.types[machine]
        match = _SIZE.fullmatch(size)
        if family not in self.families or match is None:
            return None
        larger = 1 if size == "large" else 2 * int(match[1] or 1)
        return self.families[family] * larger


_TABLE = TypeAdapter(dict[str, ProviderPrices])


def hourly_usd(settings: Settings, provider: str, machine: str, *, spot: bool = False) -> float | None:
    """Returns USD for an hour of a machine type (`c7i.2xlarge`); None: in no table. Raises: SettingsInvalid."""
    for file in filter(None, (settings.instance_prices, _COMMITTED)):
        prices = _read(file).get(provider)
        if prices is not None and (price := prices.on_demand(machine)) is not None:
            return price * prices.spot if spot else price
    return None


def instance_usd(settings: Settings, provider: str, resource_class: str) -> float | None:
    """Returns USD for an hour of an instance, by a cloud's preferred type or its class. Raises: as `hourly_usd`."""
    clouds = {
        "ec2": (settings.ec2_types, settings.ec2_spot),
        "alibaba": (settings.alibaba_types, settings.alibaba_spot),
    }
    if provider not in clouds:
        return hourly_usd(settings, provider, resource_class)
    types, spot = clouds[provider]
    candidates = machines(types, resource_class)
    return hourly_usd(settings, provider, candidates[0], spot=spot) if candidates else None


def prices_of(settings: Settings) -> Callable[[str, str], float | None]:
    """Returns `instance_usd` by provider and class, with a cache. None: unknown, also if no price can be read."""

    @cache
    def price(provider: str, resource_class: str) -> float | None:
        try:
            return instance_usd(settings, provider, resource_class)
        except SettingsInvalid as error:
            log.warning("instances.no_price", provider=provider, error=str(error))
            return None

    return price


def machines(types: Sequence[str], resource_class: str) -> list[str]:
    """Returns `Settings.ec2_types` of a resource class, the preferred one first; empty: the launch template's."""
    pairs = [one.rpartition("=") for one in types]
    own = [machine for name, _, machine in pairs if name == resource_class]
    return own or [machine for name, _, machine in pairs if not name]


def _read(file: Path) -> dict[str, ProviderPrices]:
    try:
        return _TABLE.validate_python(yaml.safe_load(file.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise SettingsInvalid(
            f"{file}: expected `PROVIDER: {{types: {{TYPE: USD per hour}}}}` as in {_COMMITTED.name}; found {error}; "
            "see MEGAFLOW_INSTANCE_PRICES"
        ) from error
