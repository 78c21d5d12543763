"""The role in PostgreSQL by which a joined host writes the ledger: what a worker needs, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from app.errors import InstallationFailed
from app.ledger.database import sql

_ACCOUNT = re.compile(r"[a-z0-9_-]{1,60}")
_GRANTS = {
    "SELECT": (
        "runs", "specs", "task_dependencies", "artifacts", "resource_classes", "quotas", "limits", "pauses",
        "model_calls", "model_messages", "model_replicas", "legal_moves", "validations",
        "experience_runs", "experience_groups", "alembic_version",
    ),
    "SELECT, UPDATE": ("tasks", "attempts"),
    "SELECT, INSERT": ("events",),
    "SELECT, INSERT, UPDATE": ("instances", "model_sessions", "created_resources", "accounts", "artifacts"),
    "SELECT, INSERT, UPDATE, DELETE": ("leases", "gradings", "semaphore_holders", "hosts", "host_images"),
}  # fmt: skip
"""Not among them: users, tokens, webhooks, schedules, other hosts; nothing that is evidence can be deleted."""


def create(connection: Connection, account: str, password: str) -> None:
    """Make the role, with its rights. The password does not reach the server: what it is checked against does.

    Raises: InstallationFailed: the ledger's own user may not make roles.
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
    grant(connection, [account])


def grant(connection: Connection, accounts: Iterable[str]) -> None:
    """Give these roles the rights of a worker on the tables that there are now."""
    for account in accounts:
        _refuse_odd(account)
        for rights, tables in _GRANTS.items():
            sql(connection, f'GRANT {rights} ON {", ".join(tables)} TO "{account}"')


def drop(connection: Connection, account: str) -> None:
    """Remove the role with all its rights, and end its sessions; nothing when there is none."""
    _refuse_odd(account)
    if sql(connection, "SELECT 1 FROM pg_roles WHERE rolname = :account", {"account": account}).first() is None:
        return
    sql(connection, f'REVOKE ALL ON ALL TABLES IN SCHEMA public FROM "{account}"')
    try:
        with connection.begin_nested():
            values = {"account": account}
            sql(connection, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = :account", values)
    except DBAPIError as error:  # without its rights a session that stays does nothing
        if getattr(error.orig, "sqlstate", None) != _DENIED:
            raise
    sql(connection, f'DROP ROLE "{account}"')


_DENIED = "42501"
"""SQLSTATE of a missing right."""


def _refuse_odd(account: str) -> None:
    if not _ACCOUNT.fullmatch(account):
        raise ValueError(f"no name of an account: {account!r}")
