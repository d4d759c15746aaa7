"""Binds gin to the dataclasses of aamoe_jax/config.py and to those of imported mixers, and to nothing else.

gin-config's own parser reads the text: bindings, blocks, macros (`width = 256`, `%width`) and `include`. What a binding
may name and hold is decided here, statement by statement, so that every complaint can say where it stands. gin's global
registry is not used: it ignores misspelt scopes in silence, checks no value, and one load would leak into the next.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
import sys
import tokenize
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from absl import logging
from gin import config_parser

from aamoe_jax.config import RENAMED, ConfigError, ExperimentConfig, shown
from aamoe_jax.extensions import import_mixers, imported
from aamoe_jax.registry import own_configs

CONFIGS = Path(__file__).parent / "configs"
"""The shipped configs, which `--gin_file` and `include` find by their bare name."""


OWN = "own"
"""The field of ModelConfig that is put together from the configs of imported mixers."""


@dataclasses.dataclass(frozen=True)
class Field:
    """A field that gin can bind: every field but those that are configs themselves."""

    owner: type
    name: str
    hint: Any
    default: Any

    @property
    def full_name(self) -> str:
        """Such as `ModelConfig.d_model`: the left-hand side of a binding."""
        return f"{self.owner.__name__}.{self.name}"


def config_classes() -> list[type]:
    """ExperimentConfig and the config dataclasses inside it, outermost first; then those of imported mixers."""
    return [*_inside(ExperimentConfig), *own_configs().values()]


def _is_config(hint: Any) -> typing.TypeGuard[type]:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _inside(cls: type) -> list[type]:
    inner = filter(_is_config, typing.get_type_hints(cls).values())
    return [cls, *(owner for hint in inner for owner in _inside(hint))]


def bindable_fields() -> dict[str, Field]:
    """Every field of every config by its full name, in the order of the schema."""
    found = []
    for owner in config_classes():
        hints = typing.get_type_hints(owner)
        found += [
            Field(owner, field.name, hints[field.name], field.default)
            for field in dataclasses.fields(owner)
            if not _is_config(hints[field.name]) and field.name != OWN
        ]
    return {field.full_name: field for field in found}


def load_experiment(gin_files: Sequence[str] = (), gin_params: Sequence[str] = ()) -> ExperimentConfig:
    """The experiment that the files describe, then the params; of several bindings of one field the last one wins.

    `import my_mixers` in a file imports mixers of the user's, before anything is bound.

    Args:
      gin_files: paths, or bare names of shipped configs such as `aamoe.gin`.
      gin_params: single bindings such as `ModelConfig.d_model = 128`.

    Raises:
      ConfigError: for text that gin cannot parse, an unknown name, a binding that nothing would consume, a value of the
        wrong type, and whatever the dataclasses refuse. One line, which says where.
    """
    try:
        statements = [statement for name in gin_files for statement in _read_file(name, None, ())]
        for text in gin_params:
            statements += _read(text, functools.partial("--gin_param {}".format, shown(text)), None, ())
        bound = _bind(statements)
    except (RecursionError, MemoryError):  # Python's parser knows both
        raise ConfigError("gin: brackets, macros or includes are nested too deeply") from None
    try:
        return _compose(ExperimentConfig, {name: statement.value for name, statement in bound.items()})
    except ConfigError as error:
        raise _located(error, bound) from None


def operative_gin(config: ExperimentConfig) -> str:
    """Gin text that imports what was imported and binds every field: it loads to an equal config, whatever the defaults
    become. Files that were imported by path are named in a comment: gin imports modules alone."""
    values = _flatten(config)
    imports = [f"# --import={name}\n" if name.endswith(".py") else f"import {name}\n" for name, _ in imported()]
    sections = ["".join(imports)] if imports else []
    for owner in config_classes():
        names = [name for name, field in bindable_fields().items() if field.owner is owner and name in values]
        if names:
            sections.append("".join(f"{name} = {values[name]!r}\n" for name in names))
    return "\n".join(sections)


def differences(left: ExperimentConfig, right: ExperimentConfig) -> dict[str, tuple[Any, Any]]:
    """The fields in which two experiments differ, with both values."""
    one, other = _flatten(left), _flatten(right)
    names = dict.fromkeys([*one, *other])
    pairs = {name: (one.get(name, "absent"), other.get(name, "absent")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def rebound(config: ExperimentConfig, values: dict[str, Any]) -> ExperimentConfig:
    """The experiment with other values for some fields, by their full names.

    Raises:
      ConfigError: for a value that the dataclasses refuse.
    """
    return _compose(ExperimentConfig, _flatten(config) | values)


def value_of(config: ExperimentConfig, field: str) -> Any:
    """The value of a field, by its full name; None where there is no such field."""
    return _flatten(config).get(field)


def describe(hint: Any) -> str:
    """A type as a reader of gin files thinks of it: choices are spelt out, `Literal` and `Union` are not mentioned."""
    arguments = get_args(hint)
    if hint is types.NoneType:
        return "None"
    if get_origin(hint) is Literal:
        return " | ".join(map(repr, arguments))
    if get_origin(hint) is tuple:
        return f"tuple[{', '.join('...' if item is Ellipsis else describe(item) for item in arguments)}]"
    return " | ".join(map(describe, arguments)) if arguments else hint.__name__


def conform(value: Any, hint: Any) -> Any:
    """`value` as the type `hint`: lists become tuples, an int may stand for a float, and a float without a fraction for
    an int, a bool for nothing but a bool.

    Raises:
      TypeError: when it is of another type.
      ValueError: an integer that 32 bits do not hold, or text that no file can hold.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal and value in arguments:
        return value
    if origin in (typing.Union, types.UnionType):
        for alternative in arguments:
            try:
                return conform(value, alternative)
            except TypeError:
                continue
    if origin is tuple and isinstance(value, (list, tuple)):
        items = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(items) == len(value):
            return tuple(map(conform, value, items))
    if hint is float:
        # gin has no literal for infinity: a config that held one could not be written down again.
        if type(value) in (int, float) and abs(value) <= sys.float_info.max:
            return float(value)
    elif hint is int and (type(value) is int or (type(value) is float and value.is_integer())):
        if abs(value) >= 2**31:
            raise ValueError("must be less than 2**31")
        return int(value)
    elif type(value) is hint:
        if hint is str and re.search("[\0\ud800-\udfff]", value):
            raise ValueError("must be text that a file can hold")
        return value
    raise TypeError(f"{shown(value)} is no {describe(hint)}")


# Reading: text -> statements.


@dataclasses.dataclass(frozen=True)
class _Statement:
    """`key = value` and where it stands. The key of a macro has no dot."""

    key: str
    value: Any
    where: str

    @property
    def is_macro(self) -> bool:
        return "." not in self.key.rsplit("/", 1)[-1]


@dataclasses.dataclass(frozen=True)
class _Macro:
    """`%name` in a value, until every file has been read."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclasses.dataclass(frozen=True)
class _Reference:
    """`@name`, which gin parses and no config field can hold."""

    name: str

    def __repr__(self) -> str:
        return f"@{self.name}"


class _Delegate(config_parser.ParserDelegate):
    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> _Reference:
        return _Reference(scoped_configurable_name + ("()" if evaluate else ""))

    def macro(self, macro_name: str) -> _Macro:
        return _Macro(macro_name)


def _read_file(name: str, beside: Path | None, including: tuple[Path, ...]) -> Iterator[_Statement]:
    """The statements of a file, looked for beside the file that includes it, here, and among the shipped configs."""
    candidates = ([beside / name] if beside else []) + [Path(name), CONFIGS / name]
    path = next((path for path in candidates if os.path.isfile(path)), None)  # False for names too long for a file
    if path is None:
        shipped = sorted(path.stem for path in CONFIGS.glob("*.gin"))
        close = difflib.get_close_matches(Path(name).stem.lower(), shipped, n=1)
        hint = _suggest([f"{stem}.gin" for stem in close]) or f"; those shipped are {', '.join(shipped)}"
        raise ConfigError(f"no gin file is called {shown(name)}{hint}")
    if path.resolve() in including:
        raise ConfigError(f"gin file {name!r} includes itself")
    if (CONFIGS / name).is_file() and not path.samefile(CONFIGS / name):
        logging.warning("%s is used, not the shipped config of that name", path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"gin file {name!r} cannot be read: {error}") from error
    yield from _read(text, lambda line: f"{name}:{line}", path.parent, (*including, path.resolve()))


def _read(
    text: str, where: Callable[[int], str], beside: Path | None, including: tuple[Path, ...]
) -> Iterator[_Statement]:
    """The statements of `text` in order, those of included files in the place of the include."""
    for statement in _parse(text, where):
        place = where(statement.location.line_num)
        if isinstance(statement, config_parser.BindingStatement):
            key = ".".join(filter(None, (statement.selector, statement.arg_name)))
            yield _Statement("/".join(filter(None, (statement.scope, key))), statement.value, place)
        elif isinstance(statement, config_parser.IncludeStatement):
            try:
                yield from _read_file(statement.filename, beside, including)
            except ConfigError as error:
                raise ConfigError(f"{place}: {error}") from None
        elif isinstance(statement, config_parser.ImportStatement):
            if statement.is_from or statement.alias:
                raise ConfigError(f"{place}: write 'import {statement.module}', without from and as")
            try:
                import_mixers(statement.module, beside=beside)
            except ConfigError as error:
                raise ConfigError(f"{place}: {error}") from None


def _parse(text: str, where: Callable[[int], str]) -> Iterator[Any]:
    """gin's parser over `text`. Its complaints, some of which are those of the tokenizer below it, become one line."""
    try:
        parser = config_parser.ConfigParser(text, _Delegate())
        while statement := parser.parse_statement():
            yield statement
    except SyntaxError as error:
        unquoted = re.search(r"Failed to parse token '(.+)'", error.msg, re.DOTALL)
        complaint = f"{unquoted[1]!r} is no value: text needs quotes" if unquoted else error.msg.strip().rstrip(".")
        raise ConfigError(f"{where(error.lineno or 1)}: {' '.join(complaint.split())}") from None
    except tokenize.TokenError as error:
        message, (line, _) = error.args
        raise ConfigError(f"{where(line)}: {message}: a bracket or quote is not closed") from None
    except StopIteration:
        raise ConfigError(f"{where(text.count(chr(10)) + 1)}: ends in the middle of a statement") from None


# Binding: statements -> one value per field.


def _bind(statements: Sequence[_Statement]) -> dict[str, _Statement]:
    """The last statement about every field, its macros resolved and its value of the field's type."""
    old = dict.fromkeys(statement.key for statement in statements if statement.key in RENAMED)
    if old:
        renamed = ", ".join(f"{key} is now {RENAMED[key]}" for key in old)
        logging.warning("%s: the next version will not know the old names", renamed)
        statements = [dataclasses.replace(one, key=RENAMED.get(one.key, one.key)) for one in statements]
    macros = {statement.key: statement for statement in statements if statement.is_macro}
    fields = bindable_fields()
    resolved: dict[str, Any] = {}
    bound = {}
    for statement in statements:
        if statement.is_macro:
            continue
        field = _field_of(statement, fields)
        value = _resolve(statement.value, statement.where, macros, resolved, ())
        try:
            value = conform(value, field.hint)
        except TypeError:
            message = f"{statement.key} = {shown(value)}: expected {describe(field.hint)}{_nearest(value, field.hint)}"
            raise ConfigError(f"{statement.where}: {message}") from None
        except ValueError as error:
            raise ConfigError(f"{statement.where}: {statement.key} = {shown(value)}: {error}") from None
        bound[statement.key] = dataclasses.replace(statement, value=value)
    for name in [name for name in macros if name not in resolved]:
        targets = [key for key, field in fields.items() if field.name == name]
        close = _suggest(targets) or did_you_mean(name, fields)
        raise ConfigError(f"{macros[name].where}: no binding uses the macro {name!r}{close}")
    return bound


def _field_of(statement: _Statement, fields: dict[str, Field]) -> Field:
    """The field that a statement binds."""
    key = statement.key
    if key in fields:
        return fields[key]
    scope, _, name = key.rpartition("/")
    owner, _, field_name = name.rpartition(".")
    cls = next((cls for cls in config_classes() if cls.__name__ == owner), None)
    elsewhere = [key for key, field in fields.items() if field.name == field_name]
    if cls is None:
        close = _suggest(elsewhere) or did_you_mean(name, fields)
        complaint = f"no config is called {owner!r}{close or f'; there are {_config_names()}'}"
    elif _is_config(inner := typing.get_type_hints(cls).get(field_name)):
        complaint = f"{name} is put together from the fields of {inner.__name__}: bind those"
    elif name not in fields:
        own = [field.name for field in fields.values() if field.owner is cls]
        complaint = f"{owner} has no field {field_name!r}{did_you_mean(field_name, own) or _suggest(elsewhere)}"
    else:
        complaint = f"nothing is built in the scope {scope!r}, so {key} would bind nothing{_suggest([name])}"
    raise ConfigError(f"{statement.where}: {complaint}")


def _resolve(
    value: Any, where: str, macros: dict[str, _Statement], resolved: dict[str, Any], trail: tuple[str, ...]
) -> Any:
    """`value` with the macros in it replaced by what they stand for, which is added to `resolved`, each once."""
    if isinstance(value, (list, tuple)):
        return type(value)(_resolve(item, where, macros, resolved, trail) for item in value)
    if isinstance(value, _Reference):
        raise ConfigError(f"{where}: {value!r}: fields hold plain values, not functions")
    if not isinstance(value, _Macro):
        return value
    if value.name not in macros:
        raise ConfigError(f"{where}: no macro is called {value.name!r}{did_you_mean(value.name, macros)}")
    if value.name in trail:
        raise ConfigError(f"{where}: the macro {value.name!r} is defined by itself")
    if value.name not in resolved:
        macro = macros[value.name]
        resolved[value.name] = _resolve(macro.value, macro.where, macros, resolved, (*trail, value.name))
    return resolved[value.name]


# Composing: one value per field -> the dataclasses, and back.


def _compose(cls: type, values: dict[str, Any]) -> Any:
    """A `cls` with the bound values; configs inside it are composed of their own."""
    arguments = {}
    for name, hint in typing.get_type_hints(cls).items():
        if _is_config(hint):
            arguments[name] = _compose(hint, values)
        elif name == OWN:
            arguments[name] = tuple(_compose(own, values) for own in own_configs().values())
        elif f"{cls.__name__}.{name}" in values:
            arguments[name] = values[f"{cls.__name__}.{name}"]
    return cls(**arguments)


def _flatten(config: Any) -> dict[str, Any]:
    """The value of every bindable field by its full name."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name == OWN:
            for own in value:
                flat |= _flatten(own)
        elif dataclasses.is_dataclass(value):
            flat |= _flatten(value)
        else:
            flat[f"{type(config).__name__}.{field.name}"] = value
    return flat


def _located(error: ConfigError, bound: dict[str, _Statement]) -> ConfigError:
    """The complaint of a dataclass with the place where the value that it complains about was bound."""
    key = str(error).partition(" = ")[0]
    return ConfigError(f"{bound[key].where}: {error}") if key in bound else error


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """`; did you mean 'X'?` for the candidate that `name` looks like, if there is one."""
    by_lower = {str(candidate).lower(): str(candidate) for candidate in candidates}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return _suggest([by_lower[key] for key in close])


def _nearest(value: Any, hint: Any) -> str:
    """A suggestion for a misspelt choice, or for a tuple of one that was written without its comma."""
    try:
        return _suggest([conform((value,), hint)])
    except (TypeError, ValueError):
        return did_you_mean(value, get_args(hint)) if isinstance(value, str) else ""


def _suggest(candidates: Sequence[Any]) -> str:
    return f"; did you mean {' or '.join(map(shown, candidates))}?" if candidates else ""


def _config_names() -> str:
    return ", ".join(sorted({field.owner.__name__ for field in bindable_fields().values()}))
