"""Owns running the product's own sources in a private copy: with changes, and with stand-ins for what they import.

A copy is executed from the file's text beside the real module, so a mutant needs no folder, no second process and,
where the compiler is among the stand-ins, no compilation.
"""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

Changes = Mapping[str, Sequence[tuple[str, str]]]
"""Module name -> (what stands there exactly once, what is put there)."""


class Sources:
    """Private copies of modules.

    Args:
        private: names, or beginnings of names that end with a dot, of modules to copy; all others are the real ones.
        changes: to copied modules; one that does not fit is an error.
        stand_ins: modules that the copies see instead of the real ones.
    """

    def __init__(
        self,
        private: Collection[str],
        changes: Changes | None = None,
        stand_ins: Mapping[str, Any] | None = None,
    ) -> None:
        self._private, self._changes, self._stand_ins = private, dict(changes or {}), dict(stand_ins or {})
        self._modules: dict[str, ModuleType] = {}
        self._builtins = {**vars(builtins), "__import__": self._import}
        unknown = [name for name in self._changes if not self._is_private(name)]
        assert not unknown, f"changes of modules that are not copied: {unknown}"

    def _is_private(self, name: str) -> bool:
        return any(name == p or (p.endswith(".") and name.startswith(p)) for p in self._private)

    def module(self, name: str) -> Any:
        """The copy of a module."""
        if name in self._stand_ins:
            return self._stand_ins[name]
        if name not in self._modules:
            real = importlib.import_module(name)
            path = Path(str(real.__file__))
            copy = ModuleType(name)
            copy.__dict__.update({"__file__": str(path), "__builtins__": self._builtins})
            self._modules[name] = copy
            exec(compile(self._text(name, path), f"<changed {path.name}>", "exec"), copy.__dict__)
        return self._modules[name]

    def _text(self, name: str, path: Path) -> str:
        text = path.read_text()
        for old, new in self._changes.get(name, ()):
            assert text.count(old) == 1, f"{name} has changed: {old!r} stands there {text.count(old)} times"
            text = text.replace(old, new)
        return text

    def _import(self, name: str, globals_: Any = None, locals_: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if level == 0 and (name in self._stand_ins or self._is_private(name)):
            return self.module(name)
        inner = {item: f"{name}.{item}" for item in fromlist or ()}
        if level == 0 and any(self._is_private(full) for full in inner.values()):
            real = importlib.import_module(name)
            return SimpleNamespace(
                **{item: self.module(full) if self._is_private(full) else getattr(real, item)
                   for item, full in inner.items()}
            )  # fmt: skip
        return builtins.__import__(name, globals_, locals_, fromlist, level)


def uncompiled(*arguments: Any, **options: Any) -> Any:
    """Stands in for `njit`: leaves a function as it is."""
    if len(arguments) == 1 and callable(arguments[0]) and not options:
        return arguments[0]
    return lambda function: function


def as_pointer(register: Callable[[Callable[..., int]], int]) -> Callable[..., Any]:
    """Stands in for `cfunc`: what a table holds is the number that `register` gives the function."""

    def cfunc(signature: Any, **options: Any) -> Any:
        return lambda function: SimpleNamespace(address=register(function), py_func=function)

    return cfunc
