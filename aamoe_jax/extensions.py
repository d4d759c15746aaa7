"""Mixers from outside the library: a user's module is imported, and registers them.

Imports are remembered, so that checkpoints name them and whoever loads one imports the same again.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from aamoe_jax.config import ConfigError
from aamoe_jax.registry import MIXERS


class Import(NamedTuple):
    """One import."""

    name: str
    """A module, or the path of a .py file, as it was given."""
    file: str
    """The absolute path of the file."""


_imported: list[Import] = []


def imported() -> tuple[Import, ...]:
    """What this process has imported, in order."""
    return tuple(_imported)


def import_mixers(name: str, *, beside: Path | None = None) -> None:
    """Imports a module that registers mixers. What is imported already is not imported again.

    Args:
      name: of a module, such as `my_mixers` or `package.mixers`; or the path of a file, such as `code/my_mixers.py`.
      beside: a folder in which the file is looked for, too, before the current one.

    Raises:
      ConfigError: there is no such module or file, it raises an error, or it registers no mixer.
    """
    path = _find(name, beside)
    if str(path) in (done.file for done in _imported):
        return
    module = _import(name, path)
    if not any(_defined_in(entry.cls, module) for entry in MIXERS.values()):
        raise ConfigError(
            f"import {name!r}: {path} registers no mixer: decorate a class with @register('its_name', 'what it does')"
        )
    _imported.append(Import(name, str(path)))


def import_again(imports: Iterable[tuple[str, str]]) -> list[str]:
    """Imports what another process had imported, by the name that was given there, or else by the file.

    Args:
      imports: (name, file) pairs.

    Returns:
      The names of those that are not to be found.
    """
    missing = []
    for name, file in imports:
        if not _try(name) and not _try(file):
            missing.append(name)
    return missing


def _try(name: str) -> bool:
    try:
        _find(name, None)
    except ConfigError:
        return False
    import_mixers(name)
    return True


def _find(name: str, beside: Path | None) -> Path:
    """The file of a module or path."""
    folders = [Path.cwd()] if beside is None else [beside, Path.cwd()]
    if name.endswith(".py"):
        relative = Path(name)
    elif all(part.isidentifier() for part in name.split(".")):
        relative = Path(*name.split(".")).with_suffix(".py")
    else:
        raise ConfigError(f"import {name!r}: must be a module such as my_mixers, or a path that ends in .py")
    for folder in folders:
        if (folder / relative).is_file():
            return (folder / relative).resolve()
    if name.endswith(".py"):
        raise ConfigError(f"import {name!r}: there is no such file in {' or '.join(map(str, folders))}")
    try:
        spec = importlib.util.find_spec(name)
    except ImportError:  # of a package around it
        spec = None
    if spec is None or spec.origin is None or not spec.has_location:
        raise ConfigError(
            f"import {name!r}: no module is called so; run from the folder that has {relative}, or give its path"
        )
    return Path(spec.origin).resolve()


def _import(name: str, path: Path) -> ModuleType:
    module = path.stem if name.endswith(".py") else name
    known = sys.modules.get(module)
    if known is not None:
        if known.__file__ is None or Path(known.__file__).resolve() != path:
            raise ConfigError(f"import {name!r}: another module is called {module!r} ({known.__file__}): rename {path}")
        return known
    try:
        if "." in module or path.name == "__init__.py":
            root = str(path.parents[module.count(".")])
            if path.name != "__init__.py" and root not in sys.path:
                sys.path.append(root)  # where its package lies
            return importlib.import_module(module)
        spec = importlib.util.spec_from_file_location(module, path)
        assert spec is not None  # the name ends in .py
        loader: Any = spec.loader
        found = importlib.util.module_from_spec(spec)
        sys.modules[module] = found  # dataclasses look their module up
        try:
            loader.exec_module(found)
        except BaseException:
            del sys.modules[module]
            raise
        return found
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = f", line {frames[-1].lineno}" if frames else ""
        raise ConfigError(f"import {name!r}: {path}{line}: {type(error).__name__}: {error}") from error


def _defined_in(cls: type, module: ModuleType) -> bool:
    return f"{cls.__module__}.".startswith(f"{module.__name__}.")
