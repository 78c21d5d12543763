"""Defines the context of a handler: the services, the caller, and the checked request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from app.artifacts import ArtifactStore, open_store
from app.client import MegaFlow
from app.errors import UnknownName
from app.ledger import explain, names
from app.ledger.database import Database, sql
from app.ledger.limits import Use
from app.ledger.stories import TaskStory
from app.ledger.users import record_action
from app.settings import Settings
from app.web.access import WebUser
from app.web.live import Live

_RUN = re.compile(r":run:([^:*]+)")
_USERS = re.compile(r"quota:|.*:user:")
"""Names of limits that belong to users."""


@dataclass(frozen=True, slots=True)
class WebServices:
    """Services that all requests share."""

    settings: Settings
    database: Database
    flow: MegaFlow
    store: ArtifactStore
    live: Live

    @classmethod
    def of(cls, settings: Settings, database: Database) -> WebServices:
        """Raises: SettingsInvalid, ArtifactStoreUnavailable."""
        store = open_store(settings.artifacts(), endpoint_url=settings.s3_endpoint_url)
        return cls(settings, database, MegaFlow(settings, database), store, Live(database))


@dataclass(frozen=True, slots=True)
class WebCall:
    """A request to a handler, with its services and its caller."""

    services: WebServices
    caller: WebUser
    path: Mapping[str, str]
    query: Any = None  # parsed by the operation's model
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def database(self) -> Database:
        return self.services.database

    @property
    def flow(self) -> MegaFlow:
        """The client; unless the caller is an administrator, it calls only registered URLs of models."""
        if self.caller.administers or self.services.settings.shared_installation:
            return self.services.flow
        return MegaFlow(self.services.settings.model_copy(update={"shared_installation": True}), self.database)

    @property
    def whose(self) -> str | None:
        """The user whose runs the caller may see; None: all users."""
        return None if self.caller.administers else self.caller.user_name

    def run(self, name: str | None = None) -> UUID:
        """Returns the run that the path, or `name`, names. Raises: UnknownName: none, or another user's."""
        name = self.path["run"] if name is None else name
        return names.find(self.database, "runs", name, user_name=self.whose)

    def task(self, name: str | None = None) -> UUID:
        """Returns the task that the path, or `name`, names. Raises: UnknownName: none, or of another user's run."""
        name = self.path["task"] if name is None else name
        return names.find(self.database, "tasks", name, user_name=self.whose)

    def check_tasks(self, task_ids: list[UUID]) -> None:
        """Raises: UnknownName: a task does not exist, or belongs to another user."""
        statement = "SELECT id FROM tasks WHERE id = ANY(:ids) AND (:all OR user_name = :user)"
        values = {"ids": task_ids, "all": self.caller.administers, "user": self.caller.user_name}
        with self.database.begin() as connection:
            known = set(sql(connection, statement, values).scalars())
        if missing := [one for one in task_ids if one not in known]:
            raise UnknownName(f"unknown task {missing[0]}")

    def visible(self, uses: Sequence[Use]) -> list[Use]:
        """Returns the limits that the caller may see: not those of other users."""
        if self.whose is None:
            return list(uses)
        own, runs = f":{self.whose}", self._own_of({match[1] for use in uses if (match := _RUN.search(use.name))})
        return [
            use
            for use in uses
            if (match[1] in runs if (match := _RUN.search(use.name)) else not _USERS.match(use.name))
            or use.name.endswith(own)
        ]

    def _own_of(self, run_ids: set[str]) -> set[str]:
        """Returns the ids of those runs that belong to the caller."""
        statement = "SELECT id::text FROM runs WHERE user_name = :user AND id::text = ANY(:ids)"
        with self.database.begin() as connection:
            return set(sql(connection, statement, {"user": self.whose, "ids": sorted(run_ids)}).scalars())

    def story(self, task_id: UUID) -> TaskStory:
        """Returns a task's story as the caller may see it: without other tasks that hold what it waits for."""
        story = explain.task(self.database, self.services.settings, task_id)
        if self.whose is None or story.now is None or story.now.place is not None:
            return story
        bounds = tuple(replace(one, why="") for one in story.now.bounds)  # of an attempt: `why` names the holder
        return replace(story, now=replace(story.now, bounds=bounds))

    def note(self, action: str, subject: object, reason: str = "", **data: Any) -> str:
        """Records an action of the caller, so that the caller's next page shows it. Returns the subject."""
        record_action(self.database, self.caller.user_name, action, [str(subject)], reason, **data)
        self.services.live.forget()
        return str(subject)

    def note_each(self, action: str, subjects: Sequence[object], reason: str) -> None:
        """Records an action of the caller on several subjects, if there are any."""
        if subjects:
            record_action(self.database, self.caller.user_name, action, list(map(str, subjects)), reason)
            self.services.live.forget()
