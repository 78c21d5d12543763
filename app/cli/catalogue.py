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
    "train": CommandEntry("train", RUN, "Train a policy"),
    "cancel": CommandEntry("runs", RUN, "Cancel a run or a task; its containers are removed", remote=True),
    "retry": CommandEntry("runs", RUN, "Run tasks again that were not scored; earlier attempts stay", remote=True),
    "schedule": CommandEntry(
        "schedules", RUN, "Recurring evaluations, stored in PostgreSQL and started by beat", remote=True
    ),
    "shell": CommandEntry("shell", RUN, "Open a terminal in a task's environment"),
    "runs": CommandEntry("runs", LOOK, "List runs, newest first", remote=True),
    "status": CommandEntry("runs", LOOK, "Show a run: every task with its mode, instance, end and times", remote=True),
    "show": CommandEntry(
        "runs", LOOK, "Show everything about one task: attempts, phases, verdict, artifacts", remote=True
    ),
    "logs": CommandEntry("runs", LOOK, "Print a task's events, its agent's log and its test report", remote=True),
    "artifacts": CommandEntry("runs", LOOK, "List the artifacts of a task's attempts, or fetch them", remote=True),
    "explain": CommandEntry("explain", LOOK, "Show which limit binds, since when, and what would help", remote=True),
    "usage": CommandEntry(
        "usage", LOOK, "Print tokens, dollars, model time and environment time; most expensive first", remote=True
    ),
    "events": CommandEntry("events", LOOK, "Print events, one JSON object per line", remote=True),
    "report": CommandEntry(
        "report", EVALUATE, "Print a run's pass rate with its interval, the tasks not scored, cost", remote=True
    ),
    "compare": CommandEntry("report", EVALUATE, "Compare the second run with the first, task by task", remote=True),
    "diagnose": CommandEntry(
        "report", EVALUATE, "Group a run's failures by what they have in common, the most frequent first", remote=True
    ),
    "sweep": CommandEntry("sweep", EVALUATE, "Run the same tasks with several values of one setting, and compare"),
    "export": CommandEntry(
        "export",
        EVALUATE,
        "Write a run for other tools: predictions, a Harbor job, tables, trajectories, samples",
        remote=True,
    ),
    "bundle": CommandEntry("export", EVALUATE, "Write a run as a folder of pages and data that need no server"),
    "experience": CommandEntry(
        "experience", EVALUATE, "Training samples: choose the runs that feed a trainer, serve samples over HTTP"
    ),
    "regrade": CommandEntry("regrade", EVALUATE, "Grade a run's stored test reports again, without agents"),
    "record": CommandEntry("export", EVALUATE, "Store a run's model answers, one file per task"),
    "dataset": CommandEntry("dataset", EVALUATE, "Datasets: list, fetch, look at and check them"),
    "env": CommandEntry("env", EVALUATE, "Environments: build the images of tasks from sources"),
    "agents": CommandEntry("agents", EVALUATE, "Agents: list them, install their frameworks"),
    "models": CommandEntry("models", EVALUATE, "Models and the inference servers that serve them"),
    "up": CommandEntry("stack", OPERATE, "Start everything on this machine"),
    "web": CommandEntry("web", OPERATE, "Print the web server's address, with a link that signs you in"),
    "mcp": CommandEntry("web", LOOK, "Serve an assistant by the Model Context Protocol", remote=True),
    "down": CommandEntry("stack", OPERATE, "Stop everything that `up` started"),
    "doctor": CommandEntry("stack", OPERATE, "Check everything that a task needs"),
    "pause": CommandEntry("control", OPERATE, "Admit no more tasks of a run", remote=True),
    "resume": CommandEntry("control", OPERATE, "Admit the tasks of a paused run again", remote=True),
    "budget": CommandEntry("control", OPERATE, "Give a run another budget"),
    "instances": CommandEntry("control", OPERATE, "List instances that have not ended"),
    "drain": CommandEntry("control", OPERATE, "Let instances finish their attempts"),
    "images": CommandEntry("images", OPERATE, "Images: fill a registry for a dataset"),
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
