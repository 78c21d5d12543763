"""Puts what earlier tasks left into the environment of one that comes after them."""

from __future__ import annotations

from app.errors import ArtifactMissing, InputMissing
from app.ledger import graphs
from app.ledger.graphs import TaskInput
from app.models.shell import Shell
from app.workers.attempt_context import AttemptContext
from app.workers.retry import retrying


def put_inputs(context: AttemptContext, shell: Shell) -> None:
    """Write each artifact that the task is to get as a file.

    Raises: InputMissing: one of them is not there; ArtifactStoreUnavailable; DatabaseUnavailable; what `put` raises.
    """
    retry = retrying(context.services.settings.lease_s)
    for wanted in retry(graphs.inputs, context.services.database, context.claimed.run_id):
        shell.put(wanted.path, _content(context, wanted))


def _content(context: AttemptContext, wanted: TaskInput) -> bytes:
    what = f"input missing: {wanted.kind.value} of task {wanted.task_name} ({wanted.task_id}) for {wanted.path}"
    if wanted.key is None:
        raise InputMissing(f"{what}: {wanted.missing or 'that task left none'}")
    try:
        return context.services.store.get(wanted.key)
    except ArtifactMissing as error:
        raise InputMissing(f"{what}: {error}") from error
