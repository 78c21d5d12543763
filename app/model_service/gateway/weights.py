"""Loads other weights into a model's engines, and verifies by the log-probabilities of a fixed probe what they serve.

`POST /megaflow/weights`, first with the step `quiet` at every gateway, then `load` at one. An engine has answered 200
to an update and served weights that were neither the old nor the new ones: only the probe is trusted.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

import aiohttp
import orjson
import structlog
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.ledger.database import Database
from app.model_service.dialects.reading import body_of, list_or_empty, value_at
from app.model_service.gateway.checks import control_request
from app.model_service.gateway.engine_faults import fault_of_error, message_of, whole_of
from app.model_service.gateway.engines import Target
from app.model_service.gateway.keys import Keys
from app.model_service.gateway.plans import engine_headers
from app.model_service.gateway.routes import Routes
from app.model_service.serving import CallRefusal
from app.models.model_calls import Dialect
from app.models.publication import OnNewWeights, Publication, WeightsReport
from app.models.spec import ModelChoice

log = structlog.get_logger()

_TIMEOUT = aiohttp.ClientTimeout(total=900.0, sock_connect=10.0)
_MOST_BYTES = 16 << 20
_LOOK_S = 0.02


class _WeightsProblem(Exception):
    """Reason why a version cannot go live."""


class WeightUpdates:
    """Handler of weight updates. For one event loop."""

    def __init__(
        self, http: aiohttp.ClientSession, routes: Routes, keys: Keys, database: Database, *, quiet_s: float
    ) -> None:
        """quiet_s: seconds in which calls under way must end."""
        self._http = http
        self._routes = routes
        self._keys = keys
        self._database = database
        self._quiet_s = quiet_s

    async def answer(self, request: Request) -> Response:
        """Returns the report as JSON. Raises: CallRefusal, ClientDisconnected, DatabaseUnavailable."""
        publication = await control_request(request, self._database, Publication)
        await self._routes.refresh()
        targets = self._routes.targets(ModelChoice(name=publication.model))
        if publication.step == "quiet":
            await self._quiet(publication, targets)
            report = WeightsReport()
        else:
            report = await self._load(publication, targets)
        return JSONResponse(report.model_dump(mode="json"))

    async def _quiet(self, wanted: Publication, targets: Sequence[Target]) -> None:
        """Waits for calls under way; the held engines start none. Raises: CallRefusal: some did not end in time."""
        give_up = time.monotonic() + self._quiet_s
        for target in targets:
            if wanted.on_new_weights is OnNewWeights.INTERRUPT:
                target.engine.interrupt()
            if wanted.on_new_weights is OnNewWeights.FINISH and target.traits.spans:
                continue  # its answers mark where the weights changed
            while target.engine.window.inside:
                if time.monotonic() > give_up:
                    message = f"{target.engine.url}: calls under way did not end within {self._quiet_s:g} s"
                    raise CallRefusal(504, "calls_under_way", message)
                await asyncio.sleep(_LOOK_S)

    async def _load(self, wanted: Publication, targets: Sequence[Target]) -> WeightsReport:
        """Updates all engines or none: at the first problem the changed ones get the old weights back."""
        changed: list[tuple[Target, list[float] | None]] = []
        try:
            for target in targets:
                before = await self._scores(target, wanted) if wanted.weights and wanted.probe else None
                if wanted.weights is not None:
                    changed.append((target, before))
                    await self._update(target, wanted.weights, wanted.version)
                if wanted.probe is not None:
                    self._verify(target, wanted, await self._scores(target, wanted), wanted.probe.logprobs)
        except _WeightsProblem as problem:
            log.warning("gateway.weights_refused", model=wanted.model, version=wanted.version, why=str(problem))
            lost = [one[0].engine.url for one in changed if not await self._restored(*one, wanted)]
            return WeightsReport(refused=self._keys.redact(str(problem)), lost=tuple(lost))
        return WeightsReport()

    async def _restored(self, target: Target, before: list[float] | None, wanted: Publication) -> bool:
        """Restores the old weights. Returns whether the engine serves them, by its probe."""
        if before is None:
            return False
        try:
            if wanted.old_weights is not None:
                await self._update(target, wanted.old_weights, target.policy_version)
            self._verify(target, wanted, await self._scores(target, wanted), [None, *before])
        except _WeightsProblem as problem:
            log.error("gateway.weights_lost", engine=target.engine.url, why=str(problem))
            return False
        return True

    def _verify(
        self, target: Target, wanted: Publication, found: Sequence[float], expected: Sequence[float | None]
    ) -> None:
        gaps = [abs(one - other) for one, other in zip(found, expected[1:], strict=True) if other is not None]
        if (worst := max(gaps)) > wanted.tolerance:
            raise _WeightsProblem(
                f"{target.engine.url}: expected log-probabilities within {wanted.tolerance:g} of the probe's, found a"
                f" difference of {worst:.3g} at token {gaps.index(worst) + 1}: it does not serve these weights"
            )

    async def _update(self, target: Target, weights: str, version: str) -> None:
        """Raises: _WeightsProblem: in the engine's own words."""
        url = target.engine.url.removesuffix("/v1") + target.traits.update
        status, content = await self._ask(target, url, {"model_path": weights, "weight_version": version})
        try:
            reply = body_of(content)
        except ValueError:
            reply = {}
        if not 200 <= status < 300 or reply.get("success") is False:
            why = reply.get("message") or message_of(content).message
            raise _WeightsProblem(f"{target.engine.url} did not take the weights (status {status}): {why!s:.500}")

    async def _scores(self, target: Target, wanted: Publication) -> list[float]:
        assert wanted.probe is not None
        ids = wanted.probe.token_ids
        model = target.upstream_model or wanted.model
        body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
        status, content = await self._ask(target, f"{target.engine.url}/completions", body)
        if status != 200:
            raise _WeightsProblem(f"{target.engine.url} does not score the probe: {message_of(content).message:.500}")
        try:
            choices = list_or_empty(body_of(content).get("choices"))
        except ValueError:
            choices = []
        scores = list_or_empty(value_at(choices[0] if choices else None, "logprobs", "token_logprobs"))[1 : len(ids)]
        if len(scores) < len(ids) - 1 or any(type(one) not in (int, float) or not math.isfinite(one) for one in scores):
            raise _WeightsProblem(
                f"{target.engine.url}: expected {len(ids) - 1} finite log-probabilities of the probe, found"
                f" {len(scores)} values, of which some may be NaN: {str(scores)[:200]}"
            )
        return [float(one) for one in scores]

    async def _ask(self, target: Target, url: str, body: dict[str, object]) -> tuple[int, bytes]:
        headers = engine_headers(self._keys, [], target, Dialect.CHAT)
        try:
            async with self._http.post(
                url, data=orjson.dumps(body), headers=headers, timeout=_TIMEOUT, allow_redirects=False
            ) as answer:
                return answer.status, await whole_of(answer, _MOST_BYTES) or b""
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = fault_of_error(error, _TIMEOUT.total or 0).why
            raise _WeightsProblem(f"{url}: {why}") from error
