"""Lists the top-level commands: the module of each, its group in the help, and its help in one line.

Static, so that the help and a misspelt command import nothing. A test compares it with the commands themselves.
"""

from __future__ import annotations

from typing import NamedTuple

RUN = "Run"
LOOK = "Look"
EVALUATE = "Evaluate"
OPERATE = "Operate"
ADMINISTER = "Administer"


class CommandEntry(NamedTuple):
    """Entry of one command. `help` is the beginning of the command's own help."""

    module: str
    panel: str
    help: str
    remote: bool = False
    """Whether it works with `--server` as well."""


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
    "explain": CommandEntry("explain", LOOK, "Show which limit binds, since when, and what would help", remote=True),
    "usage": CommandEntry("usage", LOOK, "Tokens, dollars, model time and environment time", remote=True),
    "events": CommandEntry("events", LOOK, "Print events, one JSON object per line", remote=True),
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
        "Write a run for other tools: predictions, a Harbor job, tables, trajectories, samples",
        remote=True,
    ),
    "bundle": CommandEntry(
        "export", EVALUATE, "Write a run as a folder of pages and data that need no server", remote=True
    ),
    "experience": CommandEntry(
        "experience", EVALUATE, "Training samples: choose the runs that feed a trainer, serve samples over HTTP"
    ),
    "regrade": CommandEntry("regrade", EVALUATE, "Judge a run's kept test reports again, without agents", remote=True),
    "record": CommandEntry("record", EVALUATE, "Fetch what a run's models said"),
    "dataset": CommandEntry("dataset", EVALUATE, "Datasets: list, fetch, look at and check them"),
    "env": CommandEntry("env", EVALUATE, "Environments: build the images of tasks from sources"),
    "agents": CommandEntry("agents", EVALUATE, "Agents: list them, install their frameworks"),
    "models": CommandEntry("models", EVALUATE, "Models: which engines answer for a model's name"),
    "up": CommandEntry("stack", OPERATE, "Start everything on this machine"),
    "web": CommandEntry("web", OPERATE, "Print where the web server is, with a link that signs you in"),
    "mcp": CommandEntry("web", LOOK, "Answer an assistant by the Model Context Protocol", remote=True),
    "down": CommandEntry("stack", OPERATE, "Stop everything that `up` started"),
    "doctor": CommandEntry("stack", OPERATE, "Look at everything that a task needs"),
    "pause": CommandEntry("control", OPERATE, "Admit no more tasks of a run", remote=True),
    "resume": CommandEntry("control", OPERATE, "Admit the tasks of a paused run again", remote=True),
    "pauses": CommandEntry("control", OPERATE, "List paused runs"),
    "deadline": CommandEntry("control", OPERATE, "Set a deadline"),
    "budget": CommandEntry("control", OPERATE, "Give a run another budget"),
    "instances": CommandEntry("control", OPERATE, "List instances that have not ended"),
    "drain": CommandEntry("control", OPERATE, "Let instances finish their attempts"),
    "images": CommandEntry("images", OPERATE, "Images: list, evict, read build logs"),
    "metrics": CommandEntry("usage", OPERATE, "Print all metrics in Prometheus' text format"),
    "classes": CommandEntry("resource_classes", ADMINISTER, "Resource classes: kinds of instances"),
    "limits": CommandEntry("limits", ADMINISTER, "Limits: show their use, waiting attempts and capacity", remote=True),
    "quota": CommandEntry("limits", ADMINISTER, "Quotas: show, set or clear what a user may have at once", remote=True),
    "users": CommandEntry("web", ADMINISTER, "Users of the web server: their tokens and scopes"),
    "webhooks": CommandEntry("events", ADMINISTER, "Webhooks: URLs that receive events as they happen"),
    "receipt": CommandEntry("audit", ADMINISTER, "Compare what was made and removed for a run"),
    "audit": CommandEntry("audit", ADMINISTER, "Check every invariant of the ledger now"),
    "simulate": CommandEntry("simulate", ADMINISTER, "Plan capacity: run synthetic tasks"),
    "hosts": CommandEntry("hosts", ADMINISTER, "List hosts: when each joined and was last seen"),
    "worker": CommandEntry("worker", ADMINISTER, "Run one of the system's processes in the foreground"),
}
