"""Shares one read-only environment among concurrent attempts of a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, Unpack

from app.environments.contract import (
    Environment,
    Forward,
    ResetProof,
    Route,
    Serve,
    Stats,
    Times,
)
from app.errors import EnvironmentFailed, StationError
from app.models.shell import CommandOptions, CommandResult, InteractiveProgram, ProgramOptions, StatefulShell

T = TypeVar("T")


class _Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closable)


class Borrowed(Environment):
    """A borrower's share of an environment, ended separately. times: its cost; None: that of the environment."""

    def __init__(self, environment: Environment, times: Times | None = None) -> None:
        self._environment = environment
        self._times = times
        self._ended: Future[None] = Future()
        self._lock = threading.Lock()
        self._opened: list[_Closable] = []

    @property
    def id(self) -> str:
        return self._environment.id

    def describe(self) -> dict[str, Any]:
        about = {**self._environment.describe(), "shared": True}
        if self._times is None:
            return about
        own, ended = self._times.describe(), about.get("phases", {})
        own["phases"] |= {phase: ended[phase] for phase in ("reset", "teardown") if phase in ended}
        return about | own

    def run(self, command: str, **how: Unpack[CommandOptions]) -> CommandResult:
        return self.abortable(lambda: self._environment.run(command, **how))

    def abortable(self, work: Callable[[], T]) -> T:
        """Returns the result of `work`. Ends at once with this handle; the command inside runs on until its timeout."""
        self._raise_if_ended()
        result: Future[T] = Future()

        def carry_out() -> None:
            try:
                result.set_result(work())
            except BaseException as error:  # noqa: BLE001  it is raised in the thread that waits
                result.set_exception(error)

        threading.Thread(target=carry_out, name="shared-command", daemon=True).start()
        ends: list[Future[Any]] = [result, self._ended]
        wait(ends, return_when=FIRST_COMPLETED)
        self._raise_if_ended()
        return result.result()

    def shell(self, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> StatefulShell:
        self._raise_if_ended()
        return WatchedShell(self._noted(self._environment.shell(cwd=cwd, env=env)), self.abortable)

    def stream(self, argv: Sequence[str], **how: Unpack[ProgramOptions]) -> InteractiveProgram:
        self._raise_if_ended()
        return self._noted(self._environment.stream(argv, **how))

    def forward(self, port: int, serve: Serve) -> Forward:
        self._raise_if_ended()
        return self._noted(self._environment.forward(port, serve))

    def put(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        self._raise_if_ended()
        self._environment.put(path, content, mode=mode)

    def get(self, path: str) -> bytes:
        self._raise_if_ended()
        return self._environment.get(path)

    def put_tree(self, archive: bytes, path: str) -> None:
        self._raise_if_ended()
        self._environment.put_tree(archive, path)

    def get_tree(self, path: str) -> bytes:
        self._raise_if_ended()
        return self._environment.get_tree(path)

    def stats(self) -> Stats:
        self._raise_if_ended()
        return self._environment.stats()

    def _reset(self) -> ResetProof:
        """Refuses: the lender resets it when the last borrower has returned it."""
        return ResetProof(clean=False, left=("others are at work in it",))

    def _destroy(self) -> None:
        """Ends this handle and what was opened through it; the environment lives on."""
        with self._lock:
            if not self._ended.done():
                self._ended.set_result(None)
            opened, self._opened = self._opened, []
        for one in opened:
            with suppress(StationError, OSError):
                one.close()

    def _noted(self, one: C) -> C:
        with self._lock:
            if not self._ended.done():
                self._opened.append(one)
                return one
        one.close()
        self._raise_if_ended()
        return one

    def _raise_if_ended(self) -> None:
        if self._ended.done():
            raise EnvironmentFailed(f"environment {self.id[:12]} was given back by this attempt.")


class WatchedShell:
    """A shell whose commands are watched like those of its environment."""

    def __init__(self, shell: StatefulShell, watched: Callable[[Callable[[], CommandResult]], CommandResult]) -> None:
        self._shell = shell
        self._watched = watched

    def run(self, command: str, *, timeout_s: float) -> CommandResult:
        return self._watched(lambda: self._shell.run(command, timeout_s=timeout_s))

    def close(self) -> None:
        self._shell.close()


class Lendable(Protocol):
    """Object by which a lender holds an environment."""

    @property
    def environment(self) -> Environment: ...


H = TypeVar("H", bound=Lendable)


@dataclass(eq=False, slots=True)
class _Loan(Generic[H]):
    made: Future[H | None]  # None: it could not be made
    borrowers: int = 0


class Loans(Generic[H]):
    """Shared environments and their borrowers. Safe to share between threads. discard: ends a useless one."""

    def __init__(self, discard: Callable[[H], None]) -> None:
        self._discard = discard
        self._lock = threading.Lock()
        self._by_key: dict[Hashable, _Loan[H]] = {}
        self._by_handle: dict[Borrowed, _Loan[H]] = {}

    def borrow(
        self, key: Hashable, make: Callable[[], H], fits: Callable[[H], bool], *, timeout_s: float
    ) -> tuple[Borrowed, bool]:
        """Returns a handle, and whether its environment was made for it. None is made while another has a fitting one.

        fits: gives another borrower's environment to one more; False when it lives no more.

        Raises: the errors of `make`; EnvironmentFailed: another borrower's `make` did not end in time.
        """
        begun = time.monotonic()
        while True:
            loan, first = self._joined(key)
            try:
                held = self._made(loan, make) if first else _of_another(loan, timeout_s)
                if held is not None and (first or fits(held)):
                    times = None if first else Times(Route.SHARED, {"hand_out": time.monotonic() - begun})
                    handle = Borrowed(held.environment, times)
                    with self._lock:
                        self._by_handle[handle] = loan
                    return handle, first
            except BaseException:
                self._left(loan, useless=first)
                raise
            self._left(loan, useless=True)

    def give_back(self, handle: Borrowed) -> H | None:
        """Ends the handle. Returns the lender's object when this was its last borrower, else None."""
        handle.destroy()
        with self._lock:
            loan = self._by_handle.pop(handle, None)
        return None if loan is None else self._counted_out(loan, useless=False)

    def close(self) -> list[H]:
        """Ends all loans and returns what was lent."""
        with self._lock:
            loans = {id(loan): loan for loan in (*self._by_key.values(), *self._by_handle.values())}
            self._by_key.clear()
            self._by_handle.clear()
        results = [loan.made.result() for loan in loans.values() if loan.made.done()]
        return [held for held in results if held is not None]

    def _joined(self, key: Hashable) -> tuple[_Loan[H], bool]:
        with self._lock:
            loan = self._by_key.get(key)
            first = loan is None
            if loan is None:
                loan = self._by_key[key] = _Loan(Future())
            loan.borrowers += 1
            return loan, first

    def _made(self, loan: _Loan[H], make: Callable[[], H]) -> H:
        try:
            held = make()
        except BaseException:
            loan.made.set_result(None)
            raise
        loan.made.set_result(held)
        return held

    def _left(self, loan: _Loan[H], *, useless: bool) -> None:
        if (held := self._counted_out(loan, useless=useless)) is not None:
            self._discard(held)

    def _counted_out(self, loan: _Loan[H], *, useless: bool) -> H | None:
        """Ends a share. Returns the environment after the last one; a useless or unused one is not lent again."""
        with self._lock:
            loan.borrowers -= 1
            if loan.borrowers == 0 or useless:
                self._by_key = {key: one for key, one in self._by_key.items() if one is not loan}
            return loan.made.result() if loan.borrowers == 0 and loan.made.done() else None


def _of_another(loan: _Loan[H], timeout_s: float) -> H | None:
    """Waits for the first borrower's environment. None: it could not be made; then it is the caller's turn."""
    try:
        return loan.made.result(timeout_s)
    except TimeoutError as error:
        raise EnvironmentFailed(f"the shared environment was not made within {timeout_s:.0f} s.") from error
