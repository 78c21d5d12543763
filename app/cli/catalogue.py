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


class CommandEntry(NamedTuple):
    """One command. `help` is the beginning of what the command says of itself."""

    module: str
    panel: str
    help: str
    remote: bool = False
    """It works with `--server` as well."""


COMMANDS: dict[str, CommandEntry] = {
    "demo": CommandEntry("demo", RUN, "Set everything up, run the demo dataset with three agents"),
    "submit": CommandEntry("submit", RUN, "Submit a dataset as one run", remote=True),
    "train": CommandEntry("train", RUN, "Train a policy: for each step a run, its groups, the trainer"),
    "cancel": CommandEntry("runs", RUN, "End a run or a task; containers go with it", remote=True),
    "retry": CommandEntry("runs", RUN, "Run again what was not scored; earlier attempts stay", remote=True),
    "schedule": CommandEntry(
        "schedules", RUN, "Recurring evaluations, kept in PostgreSQL and started by beat", remote=True
    ),
    "shell": CommandEntry("shell", RUN, "Open a terminal in a task's environment"),
    "runs": CommandEntry("runs", LOOK, "List runs, newest first", remote=True),
    "status": CommandEntry("runs", LOOK, "Where a run stands", remote=True),
    "show": CommandEntry("runs", LOOK, "Everything about one task: attempts, phases, verdict, evidence", remote=True),
    "logs": CommandEntry("runs", LOOK, "The events of a task, then its agent's log", remote=True),
    "artifacts": CommandEntry("runs", LOOK, "List what an attempt left as evidence, or fetch it", remote=True),
    "explain": CommandEntry("explain", LOOK, "Which limit binds, since when, and what would help", remote=True),
    "usage": CommandEntry("usage", LOOK, "Tokens, dollars, model time and environment time", remote=True),
    "events": CommandEntry("events", LOOK, "Print what happened, one JSON object a line", remote=True),
    "report": CommandEntry(
        "report", EVALUATE, "A run's pass rate with its interval, what was lost and why, cost", remote=True
    ),
    "compare": CommandEntry("report", EVALUATE, "What the second run has over the first, task by task", remote=True),
    "diagnose": CommandEntry(
        "report", EVALUATE, "What went wrong in a run, by what the failures have in common", remote=True
    ),
    "sweep": CommandEntry("sweep", EVALUATE, "Run the same tasks with several values of one setting, and compare"),
    "export": CommandEntry(
        "export",
        EVALUATE,
        "Write a run for others: predictions, a Harbor job, tables, trajectories, samples",
        remote=True,
    ),
    "bundle": CommandEntry(
        "export", EVALUATE, "Write a run as a folder of pages and data that need no server", remote=True
    ),
    "experience": CommandEntry(
        "experience", EVALUATE, "Training samples: which runs feed a trainer, and handing out over HTTP"
    ),
    "regrade": CommandEntry("regrade", EVALUATE, "Judge a run's kept test reports again, without agents", remote=True),
    "record": CommandEntry("record", EVALUATE, "Fetch what a run's models said"),
    "dataset": CommandEntry("dataset", EVALUATE, "Datasets: which are known, fetching, looking at and checking them"),
    "env": CommandEntry("env", EVALUATE, "Environments: building the images of tasks from sources"),
    "agents": CommandEntry("agents", EVALUATE, "Agents: which there are, installing their frameworks"),
    "models": CommandEntry("models", EVALUATE, "Models: which engines answer for a model's name"),
    "up": CommandEntry("stack", OPERATE, "Start everything on this machine"),
    "web": CommandEntry("web", OPERATE, "Print where the web server is, with a link that signs you in"),
    "mcp": CommandEntry("web", LOOK, "Answer an assistant by the Model Context Protocol", remote=True),
    "down": CommandEntry("stack", OPERATE, "Stop everything that `up` started"),
    "doctor": CommandEntry("stack", OPERATE, "Look at everything that a task needs"),
    "pause": CommandEntry("control", OPERATE, "Admit nothing more of a run", remote=True),
    "resume": CommandEntry("control", OPERATE, "Admit the tasks of a paused run again", remote=True),
    "pauses": CommandEntry("control", OPERATE, "What is paused"),
    "deadline": CommandEntry("control", OPERATE, "Set a deadline"),
    "budget": CommandEntry("control", OPERATE, "Give a run another budget"),
    "instances": CommandEntry("control", OPERATE, "Instances that have not ended"),
    "drain": CommandEntry("control", OPERATE, "Let instances finish what they have"),
    "images": CommandEntry("images", OPERATE, "Images: what this host has, what the queue needs"),
    "metrics": CommandEntry("usage", OPERATE, "Print all metrics in Prometheus' text format"),
    "classes": CommandEntry("resource_classes", ADMINISTER, "Resource classes: kinds of instances"),
    "limits": CommandEntry("limits", ADMINISTER, "Limits: who uses them, who waits, what they are set to", remote=True),
    "quota": CommandEntry("limits", ADMINISTER, "Quotas: what a user may have at once", remote=True),
    "users": CommandEntry("web", ADMINISTER, "Users of the web server: their tokens and scopes"),
    "webhooks": CommandEntry("events", ADMINISTER, "URLs that are told of events as they happen"),
    "receipt": CommandEntry("audit", ADMINISTER, "What was made for a run and what was removed"),
    "audit": CommandEntry("audit", ADMINISTER, "Check every invariant of the ledger now"),
    "simulate": CommandEntry("simulate", ADMINISTER, "Plan capacity: run synthetic tasks"),
    "hosts": CommandEntry("hosts", ADMINISTER, "List hosts: which joined, when each was last seen"),
    "worker": CommandEntry("worker", ADMINISTER, "Run one of the system's processes in the foreground"),
}
