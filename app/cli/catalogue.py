"""Every command of the top level: the module that has it, its group in the help and its help in one line.

Static, so that the help and a misspelt command cost no import. A test compares it with the commands themselves.
"""

from __future__ import annotations

from typing import NamedTuple

RUN = "Run"
LOOK = "Look"
EVALUATE = "Evaluate"
OPERATE = "Operate"
ADMINISTER = "Administer"


class Entry(NamedTuple):
    """One command. `help` is the beginning of what the command says of itself."""

    module: str
    panel: str
    help: str


COMMANDS: dict[str, Entry] = {
    "demo": Entry("demo", RUN, "Set everything up, run the demo dataset with three agents"),
    "submit": Entry("submit", RUN, "Submit a dataset as one run"),
    "cancel": Entry("runs", RUN, "End a run or a task; containers go with it"),
    "retry": Entry("runs", RUN, "Run again what was not scored; earlier attempts stay"),
    "schedule": Entry("schedules", RUN, "Recurring evaluations, kept in PostgreSQL and started by beat"),
    "shell": Entry("shell", RUN, "Open a terminal in a task's environment"),
    "runs": Entry("runs", LOOK, "List runs, newest first"),
    "status": Entry("runs", LOOK, "Where a run stands"),
    "show": Entry("runs", LOOK, "Everything about one task: attempts, phases, verdict, evidence"),
    "logs": Entry("runs", LOOK, "The events of a task, then its agent's log"),
    "artifacts": Entry("runs", LOOK, "List what an attempt left as evidence, or fetch it"),
    "explain": Entry("explain", LOOK, "Which limit binds, since when, and what would help"),
    "usage": Entry("usage", LOOK, "Tokens, dollars, model time and environment time"),
    "events": Entry("events", LOOK, "Print what happened, one JSON object a line"),
    "environments": Entry("environments", LOOK, "How long environments took, phase by phase"),
    "record": Entry("replay", EVALUATE, "Fetch what a run's models said"),
    "replay": Entry("replay", EVALUATE, "Do a run again with the recorded answers of its models"),
    "compare": Entry("replay", EVALUATE, "Compare patches and verdicts of two runs of the same tasks"),
    "agents": Entry("agents", EVALUATE, "Agents: which there are, installing their frameworks"),
    "models": Entry("models", EVALUATE, "Models: which engines answer for a model's name"),
    "up": Entry("stack", OPERATE, "Start everything on this machine"),
    "down": Entry("stack", OPERATE, "Stop everything that `up` started"),
    "doctor": Entry("stack", OPERATE, "Look at everything that a task needs"),
    "pause": Entry("control", OPERATE, "Admit nothing more of a run, a user or a class"),
    "resume": Entry("control", OPERATE, "Admit the tasks of a paused run, user or class again"),
    "pauses": Entry("control", OPERATE, "What is paused"),
    "deadline": Entry("control", OPERATE, "What of a run or task has not ended by then ends"),
    "budget": Entry("budget", OPERATE, "Give a run another budget"),
    "instances": Entry("control", OPERATE, "Instances that have not ended"),
    "drain": Entry("control", OPERATE, "Let instances finish what they have"),
    "images": Entry("images", OPERATE, "Images: what this host has, what the queue needs"),
    "metrics": Entry("environments", OPERATE, "Print all metrics in Prometheus' text format"),
    "classes": Entry("offers", ADMINISTER, "Resource classes: kinds of instances"),
    "limits": Entry("limits", ADMINISTER, "Limits: who uses them, who waits, what they are set to"),
    "quota": Entry("limits", ADMINISTER, "Quotas: what a user may have at once"),
    "webhooks": Entry("events", ADMINISTER, "URLs that are told of events as they happen"),
    "receipt": Entry("audit", ADMINISTER, "What was made for a run and what was removed"),
    "audit": Entry("audit", ADMINISTER, "Check every invariant of the ledger now"),
    "simulate": Entry("simulate", ADMINISTER, "Plan capacity: run synthetic tasks"),
    "worker": Entry("worker", ADMINISTER, "Run one of the system's processes in the foreground"),
}
