"""Checkpoints: the one module around Orbax.

A checkpoint is a folder named after its step, which appears in one rename when all of it is written; in a bucket, where
nothing can be renamed, it counts from when `commit_success.txt` is in it, which is written last:

  params     the parameters, a nested dict under the model's path names
  optimizer  the optimizer's state, a nested dict
  meta       JSON: format, step, key, weights of sparsity losses, position in the data, config, imported mixers,
             datasets, library versions, validation loss, steps skipped in a row, number of metrics

Orbax does not notice a flipped bit inside an array, nor a missing file (it reads zeros), so `meta` also holds a
fingerprint of every array and of itself.

A checkpoint counts as damaged only if that is proven: all of its files can be read, and they do not hold what was
written. A read that fails is tried again, and then ends the program; the checkpoint stays as it is.

Several processes write one checkpoint together, each its part of the arrays, to a folder that all of them see; process
0 tidies up. Each reads what it needs, on whatever mesh, and all of them take a checkpoint or none does.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import platform
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import serialization
from jaxtyping import Array, Shaped, UInt32

from aamoe_jax.bucket import AnyPath, BucketPath, location
from aamoe_jax.config import ConfigError, ExperimentConfig, first_line, from_dict, to_dict
from aamoe_jax.extensions import import_again, imported
from aamoe_jax.files import SaveError, files_below, read_through, remove_folder
from aamoe_jax.training import distributed, exchange
from aamoe_jax.training.silence import silence_orbax
from aamoe_jax.training.state import Placement, TrainState, abstract_params

FORMAT, FOLDER = 1, "checkpoints"
COMMIT = "commit_success.txt"  # Orbax's: the last file of a checkpoint in a bucket
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
RETRY_AFTER = (1.0, 5.0)
"""Seconds to wait before a failed read is tried again."""
POLL_SECONDS = 5.0
"""How often a bucket is asked whether a checkpoint is complete."""

Which = Literal["latest", "best"]
Meta = dict[str, Any]
Read = TypeVar("Read")


class CheckpointError(ConfigError):
    """A checkpoint that is missing or does not fit. The message says which, and what to do next."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint that is damaged."""


class UnreadableCheckpointError(CheckpointError):
    """A checkpoint that could not be read this time: storage or memory failed, and it may be intact."""


class InUseError(ConfigError):
    """The run folder has another owner, which is alive."""


class Snapshot(NamedTuple):
    """What a checkpoint is written from."""

    state: TrainState
    config: ExperimentConfig
    datasets: dict[str, Any]
    validation_loss: float | None = None
    skipped: int = 0
    """So many steps before it were not finite, in a row. Where there are any, no older checkpoint is removed for it:
    its parameters may be what is wrong."""
    records: int = 0
    """Of metrics, until here."""


class Checkpoint(NamedTuple):
    """What evaluation needs of a checkpoint."""

    config: ExperimentConfig
    params: dict[str, Any]
    """For `aamoe_jax.model.merge`."""
    step: int
    metadata: Meta
    """All of `meta`: `datasets`, `versions`, `validation_loss`, ..."""


def load_checkpoint(
    path: str | AnyPath, which: Which = "latest", place_on: Callable[[ExperimentConfig], Placement] | None = None
) -> Checkpoint:
    """A checkpoint by its path alone: that of a run folder, of its checkpoints, or of a single one. Of several
    processes every one reads what process 0 found.

    Args:
      which: of several checkpoints the newest, or the one with the lowest validation loss.
      place_on: from the config of the checkpoint to where its parameters shall lie; None: on one device.

    Raises:
      CheckpointError: there is none, it was written by a newer version, or its parameters are not those of its config.
      CorruptCheckpointError: it is damaged.
      UnreadableCheckpointError: storage or memory failed.
    """
    directory, meta = _found_by_all(path, which)
    config = read_config(directory, meta)
    like = None if place_on is None else abstract_params(config.model, place_on(config))
    return Checkpoint(config, _checked_params(directory, like, meta), meta["step"], meta)


def load_params(path: str | AnyPath, like: dict[str, Any]) -> tuple[dict[str, Any], Meta]:
    """The parameters of the newest checkpoint in `path`, read straight into the shardings of `like`, and its metadata.

    Raises:
      CheckpointError: there is none, or its arrays have other names or shapes.
      CorruptCheckpointError: it is damaged.
      UnreadableCheckpointError: storage or memory failed.
    """
    directory, meta = _found_by_all(path, "latest")
    return _checked_params(directory, like, meta), meta


def load_config(path: str | AnyPath) -> ExperimentConfig:
    """The experiment of the newest checkpoint in `path`. Raises what `load_checkpoint` does."""
    return read_config(*_found_by_all(path, "latest"))


def _found_by_all(path: str | AnyPath, which: Which) -> tuple[AnyPath, Meta]:
    """The folder of one checkpoint, or of weights as other programs hold them, and its metadata. In the folder of a
    run that is being trained, processes may find different ones."""
    found = unanimous(lambda: str(find_checkpoint(location("checkpoint", path), which)))
    directory = location("checkpoint", distributed.gather(distributed.unique("checkpoint"), found)[0])
    read = exchange.read_meta if exchange.is_exported(directory) else read_meta
    return directory, unanimous(lambda: read(directory))


def _checked_params(directory: AnyPath, like: dict[str, Any] | None, meta: Meta) -> dict[str, Any]:
    """The parameters of a checkpoint. Nobody computes fingerprints, which takes all, before all have read them."""
    if exchange.is_exported(directory):
        return unanimous(lambda: exchange.read_params(directory, meta, like))
    params = unanimous(lambda: _restore(directory, "params", like))
    unanimous(lambda: _check_fingerprints(directory, {"params": params}, meta))
    return params


def find_checkpoint(path: AnyPath, which: Which = "latest") -> AnyPath:
    """The folder of one checkpoint, given that of a run, of its checkpoints, or of itself."""
    if exchange.is_exported(path):
        return path
    if _is_step(path) and (path / "meta").is_dir():
        return path
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    steps = saved_steps(folder)
    if not steps:
        if isinstance(path, BucketPath) and (path / exchange.WEIGHTS).is_file():
            raise CheckpointError(f"{path} holds safetensors, which are not read from buckets: copy the folder to here")
        raise CheckpointError(f"there is no checkpoint in {str(path)!r}: pass a run folder or one of its checkpoints")
    if which == "latest":
        return folder / str(steps[-1])
    best = _best({step: _validation_loss(folder / str(step)) for step in steps})
    if best is None:
        raise CheckpointError(f"no checkpoint in {str(path)!r} was evaluated, so none is the best: take the latest")
    return folder / str(best)


def saved_steps(folder: AnyPath) -> list[int]:
    """Steps of the complete checkpoints in a folder, oldest first."""
    return sorted(int(path.name) for path in folder.glob("*") if _is_step(path) and is_complete(path))


def is_complete(directory: AnyPath) -> bool:
    """Whether all of a checkpoint is written."""
    return (directory / COMMIT).is_file() if isinstance(directory, BucketPath) else directory.is_dir()


def _is_step(path: AnyPath) -> bool:
    return path.name.isascii() and path.name.isdecimal()


def read_meta(directory: AnyPath) -> Meta:
    """The JSON of a checkpoint, checked."""

    def read() -> tuple[Meta, bool, bool]:
        meta = json.loads((directory / "meta" / "metadata").read_text())
        return meta, meta["format"] <= FORMAT, meta["digest"] == _digest(meta)

    meta, readable, intact = read_with_retries(directory / "meta", read)
    if not readable:
        raise CheckpointError(
            f"{directory} has checkpoint format {meta['format']}, this version reads up to {FORMAT}: update aamoe_jax"
        )
    if not intact or str(meta["step"]) != directory.name:
        raise _corrupt(directory, "its metadata was altered")
    return meta


def read_config(directory: AnyPath, meta: Meta) -> ExperimentConfig:
    """The experiment of a checkpoint; mixers that were imported for it are imported again.

    Raises:
      CheckpointError: its stack has a mixer that is not to be found.
    """
    missing = import_again(map(tuple, meta.get("imports", ())))
    try:
        return from_dict(ExperimentConfig, meta["config"])
    except ConfigError as error:
        if not missing:
            raise
        flags = " ".join(f"--import={name}" for name in missing)
        raise CheckpointError(
            f"{directory} was trained with {flags}, which is not to be found from {Path.cwd()}: "
            "run from the folder that has it, or pass --import=PATH"
        ) from error


class CheckpointStore(contextlib.AbstractContextManager["CheckpointStore"]):
    """The checkpoints of one run: writes them beside the training, keeps the newest and the best.

    What goes wrong while writing is raised by the next call, whichever it is, as a SaveError.
    """

    def __init__(self, folder: AnyPath, *, keep_last: int):
        self.folder = folder.absolute()  # Orbax takes no others
        self._keep_last = keep_last
        self._writing: int | None = None
        self._polled = 0.0
        self._supersedes = True
        try:
            if distributed.is_first():
                self.folder.mkdir(parents=True, exist_ok=True)
                self._remove_unfinished()
        except OSError as error:
            raise SaveError(f"{self.folder} cannot be made: {error.strerror}") from error
        distributed.wait_for_all("folder")
        if not isinstance(self.folder, BucketPath) and not self.folder.is_dir():
            raise SaveError(f"{self.folder}, made by process 0, is not here: the run folder must be one that all see")
        self._losses = {step: _validation_loss(self.folder / str(step)) for step in self.steps()}
        silence_orbax()
        self._checkpointer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif jax.process_count() == 1:  # others may never finish their part
            # Finish what is being written, and let no second error hide the one that is on its way out.
            try:
                self.close()
            except SaveError as second:
                if error is not second and not isinstance(error, SaveError):
                    print(f"error: {second}", file=sys.stderr)

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return saved_steps(self.folder)

    def save(self, snapshot: Snapshot) -> None:
        """Starts to write a checkpoint; returns when the arrays are copied, so that the state may be donated."""
        self.wait()
        meta = metadata(snapshot)
        step = meta["step"]
        items = {name: ocp.args.StandardSave(tree) for name, tree in trees_of(snapshot.state).items()}
        self._writing, self._losses[step], self._supersedes = step, snapshot.validation_loss, snapshot.skipped == 0
        try:
            self._checkpointer.save(
                str(self._directory(step)),
                args=ocp.args.Composite(**items, meta=ocp.args.JsonSave(meta)),
            )
        except Exception as error:
            raise self._failed(error) from error

    def poll(self) -> None:
        """Raises what went wrong; removes superseded checkpoints once a new one is complete. Cheap: for every step."""
        try:
            self._checkpointer.check_for_errors()
        except Exception as error:
            raise self._failed(error) from error
        if self._writing is None or not self._is_written(self._writing):
            return
        self._writing = None
        if not self._supersedes or not distributed.is_first():
            return
        steps = self.steps()
        kept = {*steps[-self._keep_last :], _best({step: self._losses[step] for step in steps})}
        for step in set(steps) - kept:
            remove_checkpoint(self._directory(step))

    def wait(self) -> None:
        """Until everything is written."""
        try:
            self._checkpointer.wait_until_finished()
        except Exception as error:
            raise self._failed(error) from error
        self._polled = 0.0
        self.poll()

    def close(self) -> None:
        """Waits, then lets go of Orbax's threads."""
        self.wait()
        self._checkpointer.close()

    def meta(self, step: int) -> Meta:
        """What `metadata` says of a step.

        Raises:
          CorruptCheckpointError: it is damaged, for whichever process.
        """
        return unanimous(lambda: read_meta(self._directory(step)))

    def restore(self, step: int, like: TrainState, meta: Meta) -> TrainState:
        """The state at a step, read straight into the shardings of `like`.

        Raises:
          CorruptCheckpointError: it is damaged, for whichever process.
        """
        directory, wanted = self._directory(step), trees_of(like)
        trees = unanimous(lambda: {name: _restore(directory, name, tree) for name, tree in wanted.items()})
        return state_of(directory, trees, like, meta)

    def set_aside(self, step: int) -> AnyPath:
        """Renames a checkpoint, so that it is neither read nor counted any more; returns where it is then."""
        target = self.folder / f"{step}.corrupt"
        self._losses.pop(step)
        if distributed.is_first():
            if target.exists():
                remove_folder(target)
            _move(self._directory(step), target)
        return target

    def _directory(self, step: int) -> AnyPath:
        return self.folder / str(step)

    def _is_written(self, step: int) -> bool:
        if isinstance(self.folder, BucketPath) and time.monotonic() - self._polled < POLL_SECONDS:
            return False
        self._polled = time.monotonic()
        return is_complete(self._directory(step))

    def _remove_unfinished(self) -> None:
        for path in self.folder.glob("*"):
            in_bucket = isinstance(path, BucketPath) and _is_step(path) and not is_complete(path)
            if in_bucket or ".orbax-checkpoint-tmp" in path.name:
                remove_folder(path)

    def _failed(self, error: Exception) -> SaveError:
        if distributed.is_loss(error):
            distributed.end_lost(error)
        step, self._writing = self._writing, None
        if step is not None:
            self._losses.pop(step, None)
        last = "there is no earlier one"
        with contextlib.suppress(OSError):  # of storage that fails at all
            if distributed.is_first():
                self._remove_unfinished()
            steps = self.steps()
            last = f"the newest complete one is of step {steps[-1]}" if steps else last
        reason = first_line(error)
        return SaveError(f"the checkpoint of step {step} could not be written to {self.folder}: {reason}; {last}")


def remove_checkpoint(directory: AnyPath) -> None:
    """Removes a checkpoint. Where this is cut short in a bucket, what is left does not look complete."""
    if isinstance(directory, BucketPath):
        (directory / COMMIT).unlink(missing_ok=True)
    remove_folder(directory)


def _move(directory: AnyPath, target: AnyPath) -> None:
    """Gives a checkpoint another name; in a bucket by a copy, made within the storage."""
    if isinstance(directory, BucketPath):
        directory.copy_folder(BucketPath(str(target)))
        remove_checkpoint(directory)
    else:
        directory.rename(target)


def metadata(snapshot: Snapshot) -> Meta:
    """All of a checkpoint but its large arrays."""
    state, step = snapshot.state, int(jax.device_get(snapshot.state.step))
    meta = {
        "format": FORMAT,
        "step": step,
        "key": jax.device_get(jax.random.key_data(state.key)).tolist(),
        "sparsity_weight": jax.device_get(state.sparsity_weight).tolist(),
        "data": {"next_step": step},
        "config": to_dict(snapshot.config),
        "imports": [list(done) for done in imported()],
        "datasets": snapshot.datasets,
        "versions": library_versions(),
        "validation_loss": snapshot.validation_loss,
        "skipped": snapshot.skipped,
        "records": snapshot.records,
        "fingerprints": state_fingerprints(state),
    }
    return meta | {"digest": _digest(meta)}


def library_versions() -> dict[str, str]:
    """Of everything that a run's numbers depend on."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in LIBRARIES}


def unanimous(read: Callable[[], Read]) -> Read:
    """What `read` returns. Where it raises a ConfigError on one process, it raises one on all of them."""
    own = None
    try:
        result = read()
    except ConfigError as error:
        own = error
    said = json.dumps([type(own).__name__, str(own)]) if own else ""
    complaints = [json.loads(text) for text in distributed.gather(distributed.unique("read"), said) if text]
    # All raise the same kind: where one of them only failed to read, nothing is proven.
    for kind in (InUseError, SaveError, UnreadableCheckpointError, CheckpointError, CorruptCheckpointError):
        for name, text in complaints:
            if name == kind.__name__:
                raise own if type(own) is kind else kind(text)
    if complaints:
        raise own or ConfigError(complaints[0][1])
    return result


def state_fingerprints(state: TrainState) -> dict[str, int]:
    """One number per array of the parameters and of the optimizer's state, by path."""
    return fingerprints(trees_of(state))


def fingerprints(trees: dict[str, Any]) -> dict[str, int]:
    """One number per array, by path. Computed where the arrays are, so sharded ones need not be gathered."""
    paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(trees), strict=True)
    numbers = jax.device_get(_fingerprints(leaves))
    names = (jax.tree_util.keystr(path, simple=True, separator="/") for path in paths)
    return {name: int(number) for name, number in zip(names, numbers, strict=True)}


def _fingerprint(x: Shaped[Array, "..."]) -> UInt32[Array, ""]:
    """Sum of the words, each times an odd number of its own: changes with any one word, and with their order.

    The numbers are products of one per axis. (XLA would spend minutes on folding a constant of the size of x.)
    """
    words = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
    for axis in reversed(range(x.ndim)):
        weights = jnp.arange(x.shape[axis], dtype=jnp.uint32) * jnp.uint32(0x9E3779B2 + 4 * axis) + 1
        words = jnp.sum(words * weights, axis=axis, dtype=jnp.uint32)
    return words


_fingerprints = jax.jit(lambda leaves: [_fingerprint(leaf) for leaf in leaves])


def _check_fingerprints(directory: AnyPath, trees: dict[str, Any], meta: Meta) -> None:
    found = fingerprints(trees)
    bad = [name for name, number in found.items() if meta["fingerprints"].get(name) != number]
    if bad:
        raise _corrupt(
            directory, f"{len(bad)} of {len(found)} arrays changed since they were written, such as {bad[0]}"
        )


def trees_of(state: TrainState) -> dict[str, Any]:
    """The large arrays of a state, as they are saved."""
    return {"params": state.params, "optimizer": serialization.to_state_dict(state.optimizer)}


def state_of(directory: AnyPath, trees: dict[str, Any], like: TrainState, meta: Meta) -> TrainState:
    """The state that was saved in `directory`, from its large arrays and its metadata.

    Raises:
      CorruptCheckpointError: an array is not what was saved.
    """
    # Of what every device holds a copy of, one process may have a bad one.
    unanimous(lambda: _check_fingerprints(directory, trees, meta))
    # Written before there were ReLU experts, it has no weights, and needs none.
    weights = meta.get("sparsity_weight", ())
    shardings = like.step.sharding, like.key.sharding, like.sparsity_weight.sharding

    def build() -> tuple[Array, Array, Array]:
        key = jax.random.wrap_key_data(jnp.asarray(meta["key"], jnp.uint32))
        return jnp.asarray(meta["step"], jnp.int32), key, jnp.asarray(weights, jnp.float32)

    # Made where it belongs: from here no array could be put on the devices of another process.
    counter, key, sparsity_weight = jax.jit(build, out_shardings=shardings)()
    optimizer = serialization.from_state_dict(like.optimizer, trees["optimizer"])
    return TrainState(counter, trees["params"], optimizer, key, sparsity_weight)


def _restore(directory: AnyPath, item: str, like: Any = None) -> Any:
    """One item of a checkpoint, with the shardings of `like`; without, as it was saved, on one device."""
    path = directory.absolute() / item
    silence_orbax()
    # Each process reads for itself: it could not wait for one that has found the checkpoint damaged.
    here = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=here, active_processes={here})
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:

        def read() -> Any:
            saved = checkpointer.metadata(str(path)).item_metadata.tree
            if like is not None:
                _require_same(directory, item, saved, like)
                return checkpointer.restore(str(path), args=ocp.args.StandardRestore(like))
            at = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), saved)
            return checkpointer.restore(str(path), args=ocp.args.StandardRestore(shapes))

        return read_with_retries(path, read)


def read_with_retries(path: AnyPath, read: Callable[[], Read]) -> Read:
    """What `read` returns. Where it fails for want of memory or of storage, it is tried again.

    Args:
      path: of the folder of an item, in that of its checkpoint.

    Raises:
      UnreadableCheckpointError: it failed every time.
      CorruptCheckpointError: everything below `path` can be read, and is not what was written.
    """
    for pause in (*RETRY_AFTER, None):
        try:
            return read()
        except CheckpointError:
            raise
        except Exception as error:  # Orbax raises bare Exceptions too
            failure = _failed_read(path, error)
            if failure is None:
                raise _corrupt(path.parent, error) from error
        if pause is not None:
            time.sleep(pause)
    raise UnreadableCheckpointError(
        f"checkpoint {path.parent} could not be read ({first_line(failure)}), {len(RETRY_AFTER) + 1} times; it may be "
        "intact, and nothing was changed: free memory or look after the storage, then run the same command again"
    )


def _failed_read(path: AnyPath, error: Exception) -> Exception | None:
    """The failure of memory or storage behind an error; None: there was none, so what was read is to blame."""
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return error
    try:
        for file in files_below(path):
            read_through(file)
    except OSError as unread:
        return unread
    return error if isinstance(error, OSError) and not isinstance(error, FileNotFoundError) else None


def _require_same(directory: AnyPath, item: str, saved: Any, like: Any) -> None:
    """Refuses a checkpoint whose arrays have other names or shapes than the model."""
    names = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    has, wants = (
        {names(path): tuple(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (saved, like)
    )
    differing = [name for name in sorted(has.keys() | wants.keys()) if has.get(name) != wants.get(name)]
    if differing:
        name = differing[0]
        raise CheckpointError(
            f"checkpoint {directory} does not fit the model: {len(differing)} of its arrays ({item}) differ, such as "
            f"{name}: {has.get(name, 'absent')} in the checkpoint, {wants.get(name, 'absent')} in the model. It is of "
            "another model, or was written by other code: use the version that wrote it, or another folder"
        )


def _corrupt(directory: AnyPath, reason: object) -> CorruptCheckpointError:
    others = [step for step in saved_steps(directory.parent) if str(step) != directory.name]
    advice = f"there are also those of steps {', '.join(map(str, others))}" if others else "there is no other"
    return CorruptCheckpointError(f"checkpoint {directory} is damaged ({first_line(reason)}); {advice}")


def _digest(meta: Meta) -> int:
    """Of everything but itself, as it reads after a trip through JSON."""
    text = json.dumps({name: value for name, value in meta.items() if name != "digest"}, sort_keys=True)
    return zlib.crc32(text.encode())


def _validation_loss(directory: AnyPath) -> float | None:
    try:
        return read_meta(directory)["validation_loss"]
    except UnreadableCheckpointError:
        raise  # without its loss, the best one would be removed as superseded
    except CheckpointError:
        return None  # whoever wants to load it will be told


def _best(losses: dict[int, float | None]) -> int | None:
    """The step with the lowest loss, if any was evaluated; of equal ones the first."""
    known = [(loss, step) for step, loss in losses.items() if loss is not None]
    return min(known)[1] if known else None
