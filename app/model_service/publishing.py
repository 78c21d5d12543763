"""Publishes a version of a policy: records it, loads it into the engines, verifies it, makes it live."""

from __future__ import annotations

from typing import Any

from app.errors import LimitInvalid, ModelEndpointUnavailable, SampleRefused
from app.ledger import experience, model_replicas
from app.ledger.database import Database
from app.ledger.model_replicas import ModelReplica
from app.model_service.checking import ask_gateway
from app.models.engines import TRAITS
from app.models.publication import OnNewWeights, ProbeSequence, Publication, WeightsReport
from app.settings import Settings

_PATH = "/megaflow/weights"
_SPARE_S = 60.0
_LOAD_S = 3600.0


def publish(
    settings: Settings,
    database: Database,
    model: str,
    version: str,
    weights: str | None = None,
    probe: ProbeSequence | None = None,
    on_new_weights: OnNewWeights = OnNewWeights.FINISH,
    *,
    takes_over: bool = False,
    unverified: bool = False,
) -> list[ModelReplica]:
    """Makes a version live at all engines of a model, or keeps the old one. Returns the replicas afterwards.

    New calls wait meanwhile. If an engine serves neither version afterwards, the model stays held.

    weights: a path at the engines; None: they have the weights already. unverified: goes live without a probe.
    takes_over: for the single publisher of a policy: replicas held by its killed publication stay held and load again.

    Raises: SampleRefused: an older version, one that was refused, or one that fails its probe; UnknownName;
        LimitInvalid: no probe, or another one is under way; ModelEndpointUnavailable: a gateway does not answer.
    """
    if (probe is None) != unverified:
        raise LimitInvalid(
            f"version {version!r} of {model}: expected a probe (`--probe FILE`) or `--unverified`, found"
            f" {'both' if unverified else 'neither'}: without a probe it goes live unverified; nothing was changed"
        )
    replicas = model_replicas.hold(database, model, takes_over=takes_over)
    try:
        publication = Publication(
            step="quiet",
            model=model,
            version=version,
            on_new_weights=on_new_weights,
            weights=weights,
            old_weights=_recorded(database, model, version, weights, replicas),
            probe=probe,
            tolerance=settings.probe_tolerance,
        )
        for base in settings.gateway_bases():
            _step(database, base, publication, settings.model_timeout_s + _SPARE_S)
    except BaseException:
        model_replicas.let_go(database, model)
        raise
    report = _load(settings, database, publication.model_copy(update={"step": "load"}))
    if report.refused is not None:
        _refuse(database, publication, report)
    now = model_replicas.swap(database, model, policy_version=version)
    experience.settle(database, model, version)
    return now


def _recorded(
    database: Database, model: str, version: str, weights: str | None, held: list[ModelReplica]
) -> str | None:
    """Records the version. Returns the weights of the live one. Raises: SampleRefused, LimitInvalid."""
    for one in held:
        if weights is not None and not TRAITS[one.engine].update:
            raise LimitInvalid(
                f"{one.url}: expected an engine that loads weights from disk while it serves (SGLang), found"
                f" {one.engine.value}; restart it with them, then publish the name alone; nothing was changed"
            )
    number = experience.publish(database, model, version, weights)
    with database.begin() as connection:
        live = experience.live_number(connection, model)
        old_weights = experience.live_weights(connection, model)
    if live is not None and live >= number:
        raise SampleRefused(
            f"expected a version after number {live} of {model}, which is live; found {version!r}, number"
            f" {number}: versions do not go back; publish its weights under a new name"
        )
    return old_weights


def _load(settings: Settings, database: Database, asked: Publication) -> WeightsReport:
    """Raises: ModelEndpointUnavailable: the gateway was lost; whether its engines were changed is not known."""
    try:
        return _step(database, settings.gateway_bases()[0], asked, _LOAD_S)
    except BaseException:
        if asked.weights is None:
            model_replicas.let_go(database, asked.model)
        raise


def _refuse(database: Database, new: Publication, report: WeightsReport) -> None:
    experience.settle(database, new.model, new.version, refused=str(report.refused))
    outcome = "the version before it stays behind the name"
    if report.lost:
        outcome = (
            f"{', '.join(report.lost)} may serve neither version, so that calls of {new.model} wait; restart"
            " it with the weights of the version before, then `megaflow models resume`"
        )
    else:
        model_replicas.let_go(database, new.model)
    raise SampleRefused(f"version {new.version!r} of {new.model} is refused: {report.refused}; {outcome}")


def _step(database: Database, base: str, asked: Publication, timeout_s: float) -> WeightsReport:
    report: dict[str, Any] = ask_gateway(base, _PATH, database, asked.model_dump(mode="json"), timeout_s)
    try:
        return WeightsReport.model_validate(report)
    except ValueError as error:
        raise ModelEndpointUnavailable(f"model gateway {base}: expected a report, found {report!r:.500}") from error
