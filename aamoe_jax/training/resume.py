"""Goes on where a run stopped, or begins it: which checkpoint, and whether the experiment is still the same."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aamoe_jax.bucket import AnyPath
from aamoe_jax.config import ConfigError, ExperimentConfig, OptimizerConfig, from_dict, to_dict
from aamoe_jax.training import distributed
from aamoe_jax.training.checkpoints import (
    CheckpointError,
    CheckpointStore,
    CorruptCheckpointError,
    Meta,
    UnreadableCheckpointError,
    library_versions,
    load_params,
)
from aamoe_jax.training.local_tier import LocalTier
from aamoe_jax.training.metrics import read_metrics
from aamoe_jax.training.optimizer import learning_rate
from aamoe_jax.training.state import TrainState

FREE_FIELDS = frozenset(
    {
        "TrainingConfig.log_every",
        "TrainingConfig.eval_every",
        "TrainingConfig.checkpoint_every",
        "TrainingConfig.keep_last",
        "TrainingConfig.local_dir",
        "TrainingConfig.local_every",
        "TrainingConfig.check_every",
        "TrainingConfig.trackers",
        # What becomes of a step that is not finite. The others are the same.
        "TrainingConfig.nonfinite",
        # Where the data lies. What it holds is compared by digest.
        "DataConfig.data_dir",
        # Who computes what. Sums are in another order then, and so are the last bits.
        "MeshConfig.data",
        "MeshConfig.fsdp",
        "MeshConfig.resource",
        "MeshConfig.tensor",
        "MeshConfig.pair_bound",
        "MeshConfig.slices",
    }
)
"""Fields that may change on resume: they cannot change what the steps are meant to compute."""
STEPS = "TrainingConfig.steps"
"""May change where the steps made so far would have been the same: see `refuse_other_schedule`."""


def restore_newest(
    store: CheckpointStore, local: LocalTier, like: TrainState, config: ExperimentConfig, datasets: dict[str, Any]
) -> tuple[TrainState, Meta] | None:
    """The state and the metadata of the newest checkpoint that is intact; None when there is no checkpoint.

    Damaged ones of the run folder are set aside with a warning, once an older one has been restored; local ones are
    passed over.

    Raises:
      ConfigError: the checkpoint is of another experiment, or of other data.
      CheckpointError: there are checkpoints in the run folder, and all that there are anywhere are damaged.
    """
    # As process 0 sees them.
    shared = json.loads(distributed.gather(distributed.unique("steps"), json.dumps(store.steps()))[0])
    found: list[tuple[int, CheckpointStore | LocalTier]] = [(step, store) for step in shared]
    found += [(step, local) for step in local.steps(like) if step not in shared]
    damaged = []
    for step, tier in sorted(found, key=lambda pair: pair[0], reverse=True):
        try:
            meta = tier.meta(step)
            refuse_other_experiment(meta, config, datasets)
            state = tier.restore(step, like, meta)
        except (CorruptCheckpointError, UnreadableCheckpointError) as error:
            if tier is local:
                distributed.warn(str(error))
            elif isinstance(error, CorruptCheckpointError):
                damaged.append((step, error))
            else:
                raise
            continue
        for number, complaint in damaged:
            distributed.warn(f"{complaint}; moved to {store.set_aside(number)}")
        _warn_of_versions(meta)
        return state, meta
    if damaged:
        raise CheckpointError(
            f"every checkpoint in {store.folder} is damaged, and none was changed: put copies back, or start again in "
            f"another run folder. The newest: {damaged[0][1]}"
        )
    return None


def warm_started(state: TrainState, like: TrainState, config: ExperimentConfig, datasets: dict[str, Any]) -> TrainState:
    """The state before the first step, with the parameters of the checkpoint that TrainingConfig.init_from names.

    Raises:
      ConfigError: it was trained with another tokenizer.
      CheckpointError: there is none, it is damaged, or it has other arrays.
    """
    path = config.training.init_from
    if path is None:
        return state

    try:
        params, meta = load_params(path, like.params)
    except ConfigError as error:
        raise type(error)(f"TrainingConfig.init_from = {path!r}: {error}") from error
    was, now = ({held.get("tokenizer_digest") for held in found.values()} for found in (meta["datasets"], datasets))
    if was and was != now:  # weights of another program may come without a tokenizer
        raise ConfigError(
            f"TrainingConfig.init_from = {path!r}: it was trained with another tokenizer, whose ids mean other text; "
            "prepare the data with its tokenizer (DataConfig.tokenizer), or begin without it"
        )
    return state._replace(params=params)


def refuse_lost_history(run_dir: AnyPath, store: CheckpointStore, checkpoint_every: int) -> None:
    """Refuses a run folder without a checkpoint that must have had one: a run does not begin again unasked.

    Metrics may be up to two intervals ahead of the first checkpoint, which is complete before the second is written.

    Raises:
      CheckpointError: it has damaged checkpoints, or metrics of steps that only come after a complete checkpoint.
    """
    aside = sorted(path.name for path in store.folder.glob("*.corrupt"))
    last = max((record["step"] for record in read_metrics(run_dir)), default=0)
    if aside or last > 2 * checkpoint_every:
        found = f"metrics up to step {last}" + (f" and the damaged {', '.join(aside)}" if aside else "")
        raise CheckpointError(
            f"{run_dir} has {found}, but no checkpoint to resume from: put the checkpoints back, take another run "
            "folder, or pass --allow_restart to begin again at step 0, which replaces the metrics"
        )


def refuse_other_experiment(meta: Meta, config: ExperimentConfig, datasets: dict[str, Any]) -> None:
    """Raises a ConfigError that lists what changed, unless nothing did that steps depend on."""
    with contextlib.suppress(ConfigError):  # fields that have moved since are compared where they are now
        meta = meta | {"config": to_dict(from_dict(ExperimentConfig, meta["config"]))}
    fields = changed_fields(meta["config"], to_dict(config), ExperimentConfig)
    changed = {name: values for name, values in fields.items() if name not in FREE_FIELDS}
    if list(changed) == [STEPS]:
        refuse_other_schedule(meta["step"], *changed.pop(STEPS), config.optimizer)
    for name, dataset in datasets.items():
        for digest in ("corpus_digest", "tokenizer_digest"):
            old, new = meta["datasets"].get(name, {}).get(digest), dataset.get(digest)
            if old != new:
                changed[f"{digest} of {name}"] = (old, new)
    if changed:
        lines = "".join(f"\n  {name}: {old!r} -> {new!r}" for name, (old, new) in changed.items())
        raise ConfigError(
            f"the run folder holds step {meta['step']} of another experiment; what changed:{lines}\n"
            "Take another run folder, or the old values. "
            f"These alone may change: {', '.join(sorted(FREE_FIELDS))}; and {STEPS}, where the schedule allows it"
        )


def refuse_other_schedule(made: int, old: int, new: int, config: OptimizerConfig) -> None:
    """Refuses other steps, unless all steps made so far had the learning rate that the new number gives them.

    Raises:
      ConfigError: one had another, or more steps were made than are wanted now.
    """
    if new < made:
        raise ConfigError(f"TrainingConfig.steps = {new}: the run folder holds step {made}; take at least as many")
    was, now = (jax.vmap(functools.partial(learning_rate, config, steps))(jnp.arange(made)) for steps in (old, new))
    same = np.asarray(was == now)
    if not same.all():
        first = int(np.argmin(same)) + 1
        raise ConfigError(
            f"TrainingConfig.steps = {new}: the run was begun with {old} and has made {made}, and with {new} step "
            f"{first} would have had another learning rate (schedule = {config.schedule!r}): take a new run folder "
            "with TrainingConfig.init_from, or the old steps; a copy of this folder goes on if its checkpoints after "
            f"step {first - 1} are removed and one is left"
        )


def changed_fields(old: dict[str, Any], new: dict[str, Any], cls: type) -> dict[str, tuple[Any, Any]]:
    """The fields in which two configs as dicts differ, under the names by which gin binds them."""
    one, other = _flatten(old, cls), _flatten(new, cls)
    both = {name: (one.get(name, "absent"), other.get(name, "absent")) for name in one | other}
    return {name: (was, now) for name, (was, now) in both.items() if was != now}


def _flatten(values: dict[str, Any], cls: type) -> dict[str, Any]:
    """`Config.field` -> value as it reads after a trip through JSON, where a tuple is a list."""
    configs: dict[str, Any] = {field.name: field.default_factory for field in dataclasses.fields(cls)}
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if name == "own":
            for owner, fields in value.items():
                flat |= {f"{owner}.{field}": json.loads(json.dumps(held)) for field, held in fields.items()}
        elif name in configs and isinstance(value, dict):
            flat |= _flatten(value, configs[name])
        else:
            flat[f"{cls.__name__}.{name}"] = json.loads(json.dumps(value))
    return flat


def _warn_of_versions(meta: Meta) -> None:
    now = library_versions()
    changed = [f"{name} {old} -> {now[name]}" for name, old in meta["versions"].items() if old != now.get(name)]
    if changed:
        distributed.warn(
            f"libraries changed since the checkpoint ({', '.join(changed)}): the run goes on, but not necessarily to "
            "the same bits"
        )
