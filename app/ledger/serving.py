"""Which hosts serve which lines: where the tasks that wait may come to run, as far as that is known beforehand.

Standing instances say where they are. Whatever else is needed is started from the host of the dispatcher that decides:
every ephemeral instance, and the pool of a class of which no instance stands yet.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping

from sqlalchemy import Connection, text

from app.ledger import classes
from app.ledger.host_images import ALIVE_S
from app.ledger.waiting import Key
from app.models.spec import Mode
from app.settings import Settings

Serving = Mapping[Key, Mapping[str, int]]
"""By the mode that tasks ask for and their class: the hosts, and how many of the tasks each takes at once."""

_ALONE = 8
"""A host that instances are started from counts for so many tasks: how many it takes may stand in settings of its own,
and every host must count alike."""
_STANDING = text("""
SELECT host, resource_class, sum(slots)::int AS slots FROM instances
WHERE mode = 'persistent' AND state = 'ready' AND host IS NOT NULL GROUP BY 1, 2
""")
_LAUNCHING = text(
    "SELECT name FROM hosts WHERE launches AND seen_at > clock_timestamp() - make_interval(secs => :gone)"
)
_GONE_S = 1.5 * ALIVE_S
"""One that starts instances speaks up before: what would be its part is not to wait for long when it is gone."""


def serving(connection: Connection, settings: Settings, launching: Collection[str] = ()) -> Serving:
    """launching: hosts that instances are started from, beside those that have told the ledger so."""
    standing: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for row in connection.execute(_STANDING):
        standing[row.resource_class][row.host] = row.slots
    launchers = {*launching, *connection.execute(_LAUNCHING, {"gone": _GONE_S}).scalars()}
    offers = classes.load(connection, settings)
    found: dict[Key, Mapping[str, int]] = {}
    for name in {*standing, *offers}:
        pool, alone = standing.get(name, {}), dict[str, int]()
        if (offer := offers.get(name)) is not None:
            pool = pool or _each(launchers, offer.pool_max * offer.pool_slots)
            alone = _each(launchers, _ALONE if offer.ephemeral_capacity > 0 else 0)
        found[Mode.PERSISTENT, name], found[Mode.EPHEMERAL, name] = pool, alone
        found[Mode.AUTO, name] = Counter(pool) + Counter(alone)
    return found


def _each(hosts: Iterable[str], slots: int) -> dict[str, int]:
    return dict.fromkeys(hosts, slots) if slots > 0 else {}
