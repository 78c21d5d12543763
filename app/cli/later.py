"""Delays imports until a command runs, so that help and usage errors are fast."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any


class _Later:
    """Stands for a module, or a function or class of it, until it is read, called or iterated over."""

    def __init__(self, module: str, name: str) -> None:
        self._place = (module, name)

    def _load(self) -> Any:
        module, name = self._place
        found = import_module(module)
        return getattr(found, name) if name else found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._load(), name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._load()(*arguments, **named)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._load())


def later(module: str, name: str = "") -> Any:
    """The module, or `name` in it, imported at its first use.

    Use it in the `else` of `if TYPE_CHECKING`. It stands for modules, functions, classes that are called and
    enumerations; not for `isinstance`, `except` and patterns, nor for an option's type.
    """
    return _Later(module, name)
