"""Manages the PostgreSQL roles of joined hosts: each has the rights that a worker needs, and no others."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

import structlog
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, ProgrammingError

from app.errors import DatabaseUnavailable, InstallationFailed
from app.ledger.database import Database, sql
from app.models.tables import InstanceRow

log = structlog.get_logger()

_ACCOUNT = re.compile(r"[a-z0-9_-]{1,60}")
_OF_INSTANCES = ", ".join(c.name for c in InstanceRow.__table__.columns if c.name not in ("provider", "handle"))
"""Columns that a host may write; not the provider and handle, since the instances that it adds are static."""
_GRANTS = {
    "SELECT": (
        "runs", "specs", "task_dependencies", "artifacts", "resource_classes", "quotas", "limits", "pauses",
        "model_calls", "model_messages", "model_replicas", "legal_moves", "validations",
        "experience_runs", "experience_groups", "alembic_version",
    ),
    "SELECT, UPDATE": ("tasks", "attempts"),
    "SELECT, INSERT": ("events",),
    f"SELECT, INSERT ({_OF_INSTANCES}, handle), UPDATE ({_OF_INSTANCES})": ("instances",),
    "SELECT, INSERT, UPDATE": ("model_sessions", "created_resources", "accounts", "artifacts"),
    "SELECT, INSERT, UPDATE, DELETE": ("leases", "gradings", "semaphore_holders", "hosts", "host_images"),
}  # fmt: skip
"""Rights by table. Not included: users, tokens, webhooks, schedules, other hosts. Evidence cannot be deleted."""

_WITHHELD = (
    "REVOKE CREATE ON SCHEMA public FROM PUBLIC",
    "DO $$ BEGIN EXECUTE 'REVOKE TEMPORARY ON DATABASE ' || quote_ident(current_database()) || ' FROM PUBLIC'; END $$",
)
"""Hosts cannot create tables, even temporary ones. If we do not own the object, PostgreSQL only logs a warning."""


def create(connection: Connection, account: str, password: str) -> None:
    """Creates the role with its rights. The server gets only a verifier of the password, not the password.

    Raises: InstallationFailed: the ledger's own user may not create roles.
    """
    driver = connection.connection.driver_connection
    assert driver is not None
    verifier = driver.pgconn.encrypt_password(password.encode(), account.encode(), b"scram-sha-256").decode()
    _refuse_odd(account)
    options = "LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION NOINHERIT"
    try:
        connection.exec_driver_sql(f"CREATE ROLE \"{account}\" {options} PASSWORD '{verifier}'")
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) != _DENIED:
            raise
        user = connection.engine.url.username
        raise InstallationFailed(
            f"expected that the ledger's user {user!r} may make roles in PostgreSQL, found that it may not; no host"
            f' joined. Try, as an administrator: ALTER ROLE "{user}" CREATEROLE'
        ) from error
    for statement in _WITHHELD:
        connection.exec_driver_sql(statement)
    grant(connection, [account])


def grant(connection: Connection, accounts: Iterable[str]) -> None:
    """Grants these roles a worker's rights on the tables that exist now."""
    for account in accounts:
        _refuse_odd(account)
        sql(connection, f'REVOKE ALL ON instances FROM "{account}"')  # an earlier release gave all of its columns
        for rights, tables in _GRANTS.items():
            sql(connection, f'GRANT {rights} ON {", ".join(tables)} TO "{account}"')


def lock_out(connection: Connection, account: str) -> None:
    """Forbids logins with the role, and lets the ledger's user end its sessions and drop what it owns."""
    if not _exists(connection, account):
        return
    # From PostgreSQL 16 on, the creator of a role may administer it, but does not inherit its rights.
    options = " WITH INHERIT TRUE, SET TRUE" if (connection.dialect.server_version_info or (0,)) >= (16,) else ""
    for statement in (f'ALTER ROLE "{account}" NOLOGIN', f'GRANT "{account}" TO CURRENT_USER{options}'):
        try:
            with connection.begin_nested():
                sql(connection, statement)
        except ProgrammingError as error:
            log.error("hosts.role_refused", account=account, reason=str(error.orig).strip())


def remove(database: Database, account: str) -> bool:
    """Ends a locked-out role's sessions, revokes its rights, and drops it with what it owns. Safe to repeat.

    False: some steps remain; the log gives the reason. A role with sessions is not dropped: it is needed to end them.
    """
    steps: tuple[str, ...] = _REMOVAL
    try:
        _end_sessions(database, account)
    except (DBAPIError, DatabaseUnavailable) as error:
        log.error("hosts.sessions_stay", account=account, reason=str(getattr(error, "orig", error)))
        steps = _REMOVAL[:1]
    try:
        for step in steps:
            with database.begin() as connection:  # the control worker may do the same concurrently
                sql(connection, "SELECT 1 FROM joined_hosts WHERE account = :name FOR UPDATE", {"name": account})
                if _exists(connection, account):
                    sql(connection, step.format(account))
    except (DBAPIError, DatabaseUnavailable) as error:
        log.error("hosts.role_stays", account=account, reason=str(getattr(error, "orig", error)))
        return False
    return steps is _REMOVAL


_REMOVAL = ('REVOKE ALL ON ALL TABLES IN SCHEMA public FROM "{}"', 'DROP OWNED BY "{}"', 'DROP ROLE "{}"')


def _end_sessions(database: Database, account: str) -> None:
    ending = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = :account"
    for _ in range(250):
        if not database.sql(ending, {"account": account}).all():
            return
        time.sleep(0.02)
    raise DatabaseUnavailable("they did not end within 5 s")


def _exists(connection: Connection, account: str) -> bool:
    _refuse_odd(account)
    role = sql(connection, "SELECT 1 FROM pg_roles WHERE rolname = :account", {"account": account})
    return role.first() is not None


_DENIED = "42501"
"""SQLSTATE of a missing right."""


def _refuse_odd(account: str) -> None:
    if not _ACCOUNT.fullmatch(account):
        raise ValueError(f"no name of an account: {account!r}")
