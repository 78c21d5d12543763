"""Turns datasets and options into task specs. Their provenance is stored with the run."""

from __future__ import annotations

from app.evaluation.submission import ALL as ALL
from app.evaluation.submission import Prepared as Prepared
from app.evaluation.submission import Submission as Submission
from app.evaluation.submission import demo_tasks as demo_tasks
from app.evaluation.submission import prepare as prepare
from app.evaluation.submission import reading_of as reading_of
from app.evaluation.submission import run_of as run_of
from app.evaluation.submission import specs_of as specs_of
from app.evaluation.submission import tasks_of as tasks_of
