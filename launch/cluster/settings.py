"""The settings of all kinds of clusters as flags: one flag for a field, however many kinds have it."""

from __future__ import annotations

import dataclasses
import typing
from typing import Annotated, Any, Literal, get_args, get_origin

from absl import flags

from aamoe_jax.config import ConfigError
from launch.cluster.gke import Gke
from launch.cluster.job import Job
from launch.cluster.slurm import Slurm
from launch.cluster.tpu_vm import TpuVm
from launch.cluster.xpk import Xpk

CLUSTERS: dict[str, type] = {"tpu_vm": TpuVm, "gke": Gke, "xpk": Xpk, "slurm": Slurm}


def settings_of(owner: type) -> dict[str, tuple[Any, str]]:
    """Type and help of every field that is a flag: of those annotated with a help."""
    hints = typing.get_type_hints(owner, include_extras=True)
    names = [field.name for field in dataclasses.fields(owner)]
    return {name: get_args(hints[name]) for name in names if get_origin(hints[name]) is Annotated}


def define_flags() -> None:
    """Defines the flags. None means that one was not given, and the field's own default stands."""
    for owner in (Job, *CLUSTERS.values()):
        for name, (kind, text) in settings_of(owner).items():
            if name in flags.FLAGS:
                continue
            users = "/".join(cluster for cluster, other in CLUSTERS.items() if name in settings_of(other))
            text = f"{users}: {text}" if users else text
            if get_origin(kind) is Literal:
                flags.DEFINE_enum(name, None, get_args(kind), text)
            elif kind is int:
                flags.DEFINE_integer(name, None, text)
            else:
                flags.DEFINE_string(name, None, text)


def from_flags(owner: type, **fixed: Any) -> Any:
    """A Job or a cluster from its flags, and from what is no flag."""
    values = fixed | {name: value for name in settings_of(owner) if (value := flags.FLAGS[name].value) is not None}
    for field in dataclasses.fields(owner):
        if field.default is dataclasses.MISSING and field.name not in values:
            raise ConfigError(f"--{field.name} is missing: {settings_of(owner)[field.name][1]}")
    return owner(**values)


def refuse_others(kind: str) -> None:
    """Refuses settings of other kinds of clusters: whoever gives one expects it to do something."""
    used = settings_of(CLUSTERS[kind]) | settings_of(Job)
    for other in CLUSTERS.values():
        for name in settings_of(other):
            if name not in used and flags.FLAGS[name].value is not None:
                raise ConfigError(
                    f"--{name} = {flags.FLAGS[name].value!r}: --cluster={kind} has no such setting; leave it out"
                )
