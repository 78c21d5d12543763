"""Defines states and legal transitions, as data.

The database refuses the same transitions as this table: the first migration writes the same moves into triggers, and a
test compares the two, pair by pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class TaskState(StrEnum):
    PENDING = "pending"  # accepted, waits in PostgreSQL
    ADMITTED = "admitted"  # holds a slot; an attempt was dispatched
    RUNNING = "running"  # a worker has claimed the attempt; also during grading
    SUCCEEDED = "succeeded"  # finished and graded, with any reward
    FAILED = "failed"  # not scored
    CANCELLED = "cancelled"


class AttemptState(StrEnum):
    DISPATCHED = "dispatched"  # its wake-up message is published; not claimed yet
    RUNNING = "running"
    GRADING = "grading"  # the agent has ended, no slot is used; grading waits or runs
    FINISHED = "finished"  # graded
    LOST = "lost"  # its worker disappeared, or its lease lapsed
    INTERRUPTED = "interrupted"  # by a drain; uses up no retry
    CANCELLED = "cancelled"
    ERROR = "error"  # a phase failed


class InstanceState(StrEnum):
    REQUESTED = "requested"  # the row is written, the provider not yet called
    BOOTING = "booting"  # the provider has launched it
    READY = "ready"  # its worker accepts messages
    BUSY = "busy"  # ephemeral: it has claimed its attempt
    DRAINING = "draining"  # finishes its work, takes nothing new
    TERMINATED = "terminated"
    FAILED = "failed"  # never became ready, or died


TASK_MOVES: Mapping[TaskState, frozenset[TaskState]] = {
    TaskState.PENDING: frozenset({TaskState.ADMITTED, TaskState.CANCELLED, TaskState.FAILED}),
    TaskState.ADMITTED: frozenset({TaskState.RUNNING, TaskState.PENDING, TaskState.CANCELLED, TaskState.FAILED}),
    TaskState.RUNNING: frozenset({TaskState.SUCCEEDED, TaskState.FAILED, TaskState.CANCELLED, TaskState.PENDING}),
    TaskState.SUCCEEDED: frozenset(),
    # `megaflow retry` reopens tasks that were not scored; their attempts stay.
    TaskState.FAILED: frozenset({TaskState.PENDING}),
    TaskState.CANCELLED: frozenset({TaskState.PENDING}),
}

_ATTEMPT_ENDS = frozenset({AttemptState.LOST, AttemptState.CANCELLED, AttemptState.INTERRUPTED, AttemptState.ERROR})
ATTEMPT_MOVES: Mapping[AttemptState, frozenset[AttemptState]] = {
    AttemptState.DISPATCHED: _ATTEMPT_ENDS | {AttemptState.RUNNING},
    AttemptState.RUNNING: _ATTEMPT_ENDS | {AttemptState.GRADING, AttemptState.FINISHED},
    AttemptState.GRADING: _ATTEMPT_ENDS - {AttemptState.INTERRUPTED} | {AttemptState.FINISHED},
    **dict.fromkeys(_ATTEMPT_ENDS | {AttemptState.FINISHED}, frozenset[AttemptState]()),
}

_INSTANCE_ENDS = frozenset({InstanceState.TERMINATED, InstanceState.FAILED})
INSTANCE_MOVES: Mapping[InstanceState, frozenset[InstanceState]] = {
    InstanceState.REQUESTED: _INSTANCE_ENDS | {InstanceState.BOOTING, InstanceState.READY},
    InstanceState.BOOTING: _INSTANCE_ENDS | {InstanceState.READY, InstanceState.DRAINING},
    InstanceState.READY: _INSTANCE_ENDS | {InstanceState.BUSY, InstanceState.DRAINING},
    InstanceState.BUSY: _INSTANCE_ENDS | {InstanceState.DRAINING},
    InstanceState.DRAINING: _INSTANCE_ENDS,
    InstanceState.TERMINATED: frozenset(),
    InstanceState.FAILED: frozenset(),
}

LIVE_ATTEMPT = frozenset({AttemptState.DISPATCHED, AttemptState.RUNNING, AttemptState.GRADING})
LIVE_INSTANCE = frozenset(InstanceState) - _INSTANCE_ENDS
ENDED_TASK = frozenset({TaskState.SUCCEEDED, TaskState.FAILED, TaskState.CANCELLED})
