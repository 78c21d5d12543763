"""Commands `receipt` and `audit`: compare a run's receipt with what exists, check the ledger's invariants."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Annotated
from uuid import UUID

import typer

from app.cli.show import Json, as_json, console
from app.client import MegaFlow
from app.errors import InstanceFailed
from app.ledger import audit as audit_
from app.ledger import receipts, results
from app.ledger.audit import AuditFinding, AuditResult
from app.ledger.receipt_check import Difference, Inventory, compare
from app.ledger.receipts import InstanceLine, ObjectLine, Receipt
from app.models.endings import RetryPolicy
from app.settings import Settings

_SHOWN = 20
"""Maximum number of lines about standing resources. `--json` has all, and every instance and object with its times."""
_LOOKS, _AGAIN_S = 3, 0.5
_YEARS_S = 10 * 365 * 86400.0

LEFT_BEHIND = 1
UNSEEN = 69
"""Exit code when the engine or a provider did not answer."""


def receipt(
    run: Annotated[str, typer.Argument(help="A run's id, the end of its id, or its name.")], json: Json = False
) -> None:
    """Compare what was made and removed for a run with what exists.

    Exit code 1: something is left behind that no record accounts for. 69: the engine or a provider did not answer.
    """
    with MegaFlow() as flow:
        run_receipt, inventory, differences = _compared(flow, results.find(flow.database, "runs", run))
    left = any(difference.left_behind for difference in differences)
    agrees = not differences and not inventory.silent
    if json:
        standing = [
            {"id": _identity(line), "why": line.why, "accounted": line.accounted} for line in run_receipt.standing
        ]
        plain = asdict(run_receipt) | {"standing": standing}
        as_json({"receipt": plain, "agrees": agrees, "differences": differences, "silent": inventory.silent})
    else:
        _print(run_receipt, differences, inventory, agrees=agrees)
    if left or inventory.silent:
        raise typer.Exit(LEFT_BEHIND if left else UNSEEN)


def _compared(flow: MegaFlow, run_id: UUID) -> tuple[Receipt, Inventory, list[Difference]]:
    """Returns the differences that every look shows: a resource made or removed in between differs only briefly."""
    differences: list[Difference] | None = None
    for _ in range(_LOOKS):
        run_receipt = receipts.of_run(flow.database, run_id)
        inventory = _of_concern(
            listed_resources(flow.settings, {line.provider for line in run_receipt.instances}), run_receipt
        )
        current = compare(run_receipt, inventory)
        differences = current if differences is None else [one for one in current if one in differences]
        if not differences:
            break
        time.sleep(_AGAIN_S)
    return run_receipt, inventory, differences or []


def _of_concern(found: Inventory, said: Receipt) -> Inventory:
    """Drops silent services that this run never used: their silence hides nothing of it."""
    used = {line.provider for line in said.instances} | {line.kind.lister for line in said.objects}
    return replace(found, silent=tuple(name for name in found.silent if name in used))


def listed_resources(settings: Settings, used: set[str]) -> Inventory:
    """Lists what exists now: objects of engine and host by label, instances of the providers in `used`."""
    from app.environments.listing import listed
    from app.instances import NAMES, provider_named

    things, silent = listed(settings)
    alive = {}
    for name in used & set(NAMES):
        try:
            alive[name] = frozenset(provider_named(name, settings).alive())
        except InstanceFailed:
            silent.append(name)
    return Inventory(tuple(things), alive, tuple(dict.fromkeys(silent)))


def _identity(line: ObjectLine | InstanceLine, length: int = 64) -> str:
    """Returns the head of an engine's id, or the tail of an instance's."""
    return line.engine_id[:length] if isinstance(line, ObjectLine) else str(line.id)[-length:]


def _print(said: Receipt, differences: list[Difference], found: Inventory, *, agrees: bool) -> None:
    ended = f"ended {said.ended_at:%Y-%m-%d %H:%M:%S}" if said.ended_at else "not ended"
    attempts = ", ".join(f"{count} {state}" for state, count in sorted(said.attempts.items())) or "none"
    _say(f"run {said.run_id} {said.name} of {said.user_name}: {said.tasks} task(s), {ended}; attempts: {attempts}")
    for kind, count in said.counts.items():
        _say(f"  {kind:<10} {count['made']} made, {count['gone']} gone, {count['standing']} standing")
    for line in said.standing[:_SHOWN]:
        _say(f"stands: {_identity(line, 12)}: {line.why}")
    for difference in differences:
        how = "LEFT BEHIND" if difference.left_behind else "differs"
        _say(f"{how}: {difference.kind} {difference.id}: {difference.what}")
    for name in found.silent:
        _say(f"not compared: {name} does not answer")
    if agrees:
        _say("agrees with what exists")


def audit(
    repair: Annotated[bool, typer.Option("--repair", help="Repair what is safe to repair.")] = False, json: Json = False
) -> None:
    """Check every invariant of the ledger now. Exit code 1 when one does not hold and was not repaired."""
    with MegaFlow() as flow:
        settings = flow.settings
        seen = audit_.look(flow.database, settings, recent_s=_YEARS_S)
        findings = seen.findings
        if repair:
            retry = RetryPolicy(settings.retry_base_s, settings.retry_cap_s)
            findings = audit_.repair(flow.database, settings, seen, retry)
            seen = audit_.look(flow.database, settings, seen.memory, recent_s=_YEARS_S)
    left = seen.findings
    if json:
        as_json({"findings": findings, "left": [f.name for f in left], "ages": seen.ages, "waiting": seen.lines})
    else:
        _print_audit(findings, seen, repaired=repair)
    if left:
        raise typer.Exit(1)


def _print_audit(findings: tuple[AuditFinding, ...], seen: AuditResult, *, repaired: bool) -> None:
    for finding in findings:
        _say(f"{finding.severity} {finding.name}: {finding.count}: {finding.means}")
        _say(f"  {', '.join(finding.ids)}{' …' if finding.count > len(finding.ids) else ''}")
        if finding.repair is not None:
            text = f"repaired {finding.repaired}: {finding.repair}" if repaired else f"`--repair`: {finding.repair}"
            _say(f"  {text}")
    for name, age in seen.ages.items():
        _say(f"{name.removesuffix('_s').replace('_', ' ')}: {'none' if age is None else f'{max(0.0, age):.1f} s'}")
    for queue, (waiting, oldest_s) in seen.lines.items():
        _say(f"{queue}: {waiting} wait, the oldest for {oldest_s:.1f} s")
    if not seen.findings:
        _say("every invariant holds" if not findings else "every invariant holds again")


def _say(text: str) -> None:
    console.print(text, soft_wrap=True)
