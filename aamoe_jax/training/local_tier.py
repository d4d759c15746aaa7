"""Checkpoints on the machines themselves, every few steps, beside the rarer ones in the run folder.

`TrainingConfig.local_dir` is a folder of every machine: on its disk, or in its memory (/dev/shm). Each process writes
the parts of the arrays that its devices hold, and a copy of those of the process before it. So nothing is missing when
all processes are started again on the same machines, nor when one of these comes back empty.

  LOCAL_DIR/ID/PROCESS/STEP/   parts.npz: by name and place; meta: see `checkpoints.py`

The ID is that of the run, in the run folder. On another mesh the parts are others, and only the run folder is of use.
Orbax's emergency checkpoints need replicas of the whole model on several slices, and its handlers of NumPy arrays write
on process 0 alone: hence NumPy's own files.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import sys
import uuid
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from aamoe_jax.bucket import AnyPath
from aamoe_jax.config import ConfigError, first_line, local_path
from aamoe_jax.files import write_whole
from aamoe_jax.training import distributed
from aamoe_jax.training.checkpoints import (
    CorruptCheckpointError,
    Meta,
    Snapshot,
    UnreadableCheckpointError,
    metadata,
    read_meta,
    read_with_retries,
    saved_steps,
    state_of,
    trees_of,
    unanimous,
)
from aamoe_jax.training.state import TrainState

FILE = "local_checkpoints.json"
PARTS = "parts.npz"
KEPT = 2
"""Complete checkpoints of a process while it writes the next. A process is at most one behind another: the older of the
two is then complete on all."""

Leaves = dict[str, Any]
"""Arrays, or their shapes with shardings, by path."""


class LocalTier(contextlib.AbstractContextManager["LocalTier"]):
    """The local checkpoints of one run, as this process sees them. Every method is called by all processes together.

    Args:
      local_dir: None: there are no local checkpoints.

    Raises:
      ConfigError: `local_dir` cannot be written.
    """

    def __init__(self, local_dir: str | None, run_dir: AnyPath):
        self._root: Path | None = None
        if local_dir is not None:
            local_path("TrainingConfig.local_dir", local_dir)
            self._root = Path(local_dir.replace("{process}", str(jax.process_index()))).absolute() / _id_of(run_dir)
            unanimous(self._make)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="local_checkpoint")
        self._writing: Future[None] | None = None
        self._supplies: dict[int, list[set[int]]] = {}

    def __exit__(self, kind: type | None, *_: object) -> None:
        self._pool.shutdown()
        self._report()

    def steps(self, like: TrainState) -> list[int]:
        """Steps whose parts are all there, oldest first.

        Args:
          like: the state as shapes with shardings.
        """
        if self._root is None:
            return []
        here, leaves = _parts_seen(self._root), _leaves(like)
        count = jax.process_count()
        wanted = [_names(leaves, process) for process in range(count)]
        can = {step: [p for p, names in enumerate(wanted) if names <= parts] for step, parts in here.items()}
        answers = [json.loads(text) for text in distributed.gather(distributed.unique("local"), json.dumps(can))]
        found = sorted({int(step) for answer in answers for step in answer})
        self._supplies = {step: [set(answer.get(str(step), ())) for answer in answers] for step in found}
        whole = [
            step
            for step, by in self._supplies.items()
            if all(process in by[process] or process in by[(process + 1) % count] for process in range(count))
        ]
        if found and found[-1] not in whole[-1:]:
            distributed.warn(
                f"parts of the local checkpoint of step {found[-1]} are missing: machines were lost together with the "
                "copies of what they had, or the mesh is another"
            )
        return whole

    def meta(self, step: int) -> Meta:
        """What `checkpoints.metadata` says of a step."""
        first = min(process for process, supplied in enumerate(self._supplies[step]) if supplied)
        own = unanimous(lambda: json.dumps(self._read_meta(step)) if jax.process_index() == first else "")
        return json.loads(distributed.gather(distributed.unique("local_meta"), own)[first])

    def restore(self, step: int, like: TrainState, meta: Meta) -> TrainState:
        """The state at one of `steps(like)`.

        Raises:
          CorruptCheckpointError, UnreadableCheckpointError: for whichever process.
        """
        assert self._root is not None
        leaves, me, count = _leaves(like), jax.process_index(), jax.process_count()
        supplied, neighbour = self._supplies[step], _ring(_mesh(leaves), 1) if count > 1 else {}
        previous = (me - 1) % count
        wanted = {process for process in (me, previous) if process in supplied[me]}
        parts = unanimous(lambda: self._read(step, set().union(*(_names(leaves, process) for process in wanted))))

        def gathered(path: str, leaf: Any, device_of: Mapping[Any, Any]) -> Array:
            places = leaf.sharding.devices_indices_map(leaf.shape)
            shape = leaf.sharding.shard_shape(leaf.shape)
            devices = sorted(leaf.sharding.addressable_devices, key=lambda device: device.id)
            names = [_name(path, places[device_of.get(device, device)], leaf.shape) for device in devices]
            nothing = np.zeros(shape, leaf.dtype)
            # A type that NumPy does not know, such as bfloat16, comes back as plain bytes.
            local = [
                jax.device_put(parts.get(name, nothing).view(leaf.dtype), at)
                for name, at in zip(names, devices, strict=True)
            ]
            return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, local)

        arrays = {path: gathered(path, leaf, {}) for path, leaf in leaves.items()}
        if not all(process in supplied[process] for process in range(count)):
            copies = {path: gathered(path, leaf, neighbour) for path, leaf in leaves.items()}
            arrays = _returned(arrays, copies, [process in supplied[process] for process in range(count)])
        trees = jax.tree.unflatten(jax.tree.structure(trees_of(like)), list(arrays.values()))
        return state_of(self._root / str(me) / str(step), trees, like, meta)

    def save(self, snapshot: Snapshot) -> None:
        """Starts to write a checkpoint; returns when the arrays are copied, so that the state may be donated.

        A failure is only a warning: there still are the checkpoints of the run folder.
        """
        if snapshot.skipped:
            return  # older ones go as newer ones come, and these parameters may be what is wrong
        if self._writing is not None:
            self._writing.exception()
            self._report()
        meta = metadata(snapshot)
        leaves, count = _leaves(snapshot.state), jax.process_count()
        parts: dict[str, Any] = _shards(leaves, {})
        if count > 1:
            held = {path: [_names({path: leaf}, p) for p in range(count)] for path, leaf in leaves.items()}
            alone = {path: leaf for path, leaf in leaves.items() if any(_lacking(held[path]))}
            for path, leaf in alone.items():  # one after the other: a copy of all would need as much memory again
                copies = _shards({path: _moved(leaf, 1)}, _ring(_mesh(leaves), 1))
                parts = {name: jax.device_get(x) for name, x in copies.items()} | parts
        self._writing = self._pool.submit(self._write, meta, {name: jax.device_get(x) for name, x in parts.items()})

    def clear(self) -> None:
        """Removes them all: the run folder has what is newer."""
        if self._root is None:
            return
        if self._writing is not None:
            self._writing.exception()
        distributed.wait_for_all("local_written")  # several processes may share the folder
        shutil.rmtree(self._root, ignore_errors=True)

    @property
    def _own(self) -> Path:
        assert self._root is not None
        return self._root / str(jax.process_index())

    def _make(self) -> None:
        try:
            self._own.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"TrainingConfig.local_dir: {self._own} cannot be made: {error.strerror}; take a folder of this "
                "machine that can be written, such as /dev/shm/checkpoints, or None"
            ) from error

    def _write(self, meta: Meta, parts: dict[str, np.ndarray]) -> None:
        for unfinished in self._own.glob("*.incomplete"):
            shutil.rmtree(unfinished)
        steps = saved_steps(self._own)
        # Later ones are of a time that has not come again: they are kept until now, for the run may be started anew.
        for step in {*steps} - {*[step for step in steps if step < meta["step"]][-KEPT:]}:
            shutil.rmtree(self._own / str(step))
        folder = self._own / f"{meta['step']}.incomplete"
        (folder / "meta").mkdir(parents=True)
        write_whole(folder / "meta" / "metadata", json.dumps(meta))
        with (folder / PARTS).open("wb") as file:
            np.savez(file, **parts)  # type: ignore[arg-type]  # no part is called `allow_pickle`
            file.flush()
            os.fsync(file.fileno())
        folder.rename(self._own / str(meta["step"]))

    def _report(self) -> None:
        """Warns of what went wrong with the last one."""
        writing, self._writing = self._writing, None
        error = None if writing is None or not writing.done() else writing.exception()
        if error is not None:
            print(f"warning: no local checkpoint could be written to {self._own}: {first_line(error)}", file=sys.stderr)

    def _read_meta(self, step: int) -> Meta:
        assert self._root is not None
        return read_meta(next(path for path in _folders(self._root) if step in saved_steps(path)) / str(step))

    def _read(self, step: int, wanted: set[str]) -> dict[str, np.ndarray]:
        """Parts of a step, by name: from the folder of this process, and from others that are seen from here."""
        assert self._root is not None
        found: dict[str, np.ndarray] = {}
        for folder in sorted(_folders(self._root), key=lambda path: path != self._own):
            directory = folder / str(step)
            if wanted <= found.keys() or not directory.is_dir():
                continue
            found |= _read_parts(directory, wanted - found.keys())
        if not wanted <= found.keys():
            raise CorruptCheckpointError(f"local checkpoint {self._own / str(step)} is damaged: parts are missing")
        return found


def _id_of(run_dir: AnyPath) -> str:
    """The ID of a run, which process 0 makes where there is none."""

    def read() -> str:
        path = run_dir / FILE
        if not distributed.is_first():
            return ""
        here = str(run_dir.absolute())
        try:
            with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
                held = json.loads(path.read_text(encoding="utf-8"))
                if held["run_dir"] == here:  # and not that of which this folder is a copy
                    return str(held["id"])
        except OSError as error:
            raise UnreadableCheckpointError(
                f"{path} cannot be read: {error.strerror}; start the same command again"
            ) from error
        new = uuid.uuid4().hex
        write_whole(path, json.dumps({"id": new, "run_dir": here}) + "\n")
        return new

    return distributed.gather(distributed.unique("id"), unanimous(read))[0]


def _folders(root: Path) -> list[Path]:
    """Of the processes that write here."""
    return [path for path in root.glob("*") if path.is_dir()]


def _parts_seen(root: Path) -> dict[int, set[str]]:
    """By step, the names of the parts that are here."""
    seen: dict[int, set[str]] = {}
    with contextlib.suppress(OSError):
        found = [(step, folder) for folder in _folders(root) for step in saved_steps(folder)]
        for step, folder in found:
            names = seen.setdefault(step, set())
            damaged = contextlib.suppress(OSError, EOFError, ValueError, zipfile.BadZipFile)
            with damaged, np.load(folder / str(step) / PARTS) as parts:
                names.update(parts)
    return seen


def _read_parts(directory: Path, wanted: set[str]) -> dict[str, np.ndarray]:
    """Those that are there. NumPy says of a damaged one that its checksum is bad."""

    def read() -> dict[str, np.ndarray]:
        with np.load(directory / PARTS) as parts:
            return {name: parts[name] for name in wanted & set(parts)}

    return read_with_retries(directory / "meta", read)


def _leaves(state: TrainState) -> Leaves:
    leaves = jax.tree_util.tree_leaves_with_path(trees_of(state))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _name(path: str, place: Sequence[slice], shape: Sequence[int]) -> str:
    """Of a part of an array: its path, and from where to where it goes along every axis."""
    ends = (part.indices(size)[:2] for part, size in zip(place, shape, strict=True))
    return " ".join([path, *(f"{start}:{stop}" for start, stop in ends)])


def _names(leaves: Leaves, process: int) -> set[str]:
    """Of the parts that the devices of a process hold."""
    return {
        _name(path, place, leaf.shape)
        for path, leaf in leaves.items()
        for device, place in leaf.sharding.devices_indices_map(leaf.shape).items()
        if device.process_index == process
    }


def _lacking(held: Sequence[set[str]]) -> list[bool]:
    """For every process, whether it lacks parts that the one before it holds."""
    return [not held[process - 1] <= names for process, names in enumerate(held)]


def _shards(leaves: Leaves, device_of: Mapping[Any, Any]) -> dict[str, Array]:
    """The parts on the devices of this process, by name.

    Args:
      device_of: whose part a device has; its own, where it is not named.
    """
    found = {}
    for path, leaf in leaves.items():
        places = leaf.sharding.devices_indices_map(leaf.shape)
        for shard in leaf.addressable_shards:
            found[_name(path, places[device_of.get(shard.device, shard.device)], leaf.shape)] = shard.data
    return found


def _mesh(leaves: Leaves) -> jax.sharding.Mesh:
    return next(iter(leaves.values())).sharding.mesh


def _ring(mesh: jax.sharding.Mesh, by: int) -> dict[Any, Any]:
    """For every device, its counterpart in the process `by` places before, around."""
    devices: dict[int, list[Any]] = {}
    for device in mesh.devices.flat:
        devices.setdefault(device.process_index, []).append(device)
    count = len(devices)
    return {d: devices[(p - by) % count][i] for p, own in devices.items() for i, d in enumerate(own)}


def _moved(leaf: Array, by: int) -> Array:
    """Every device has the part of its counterpart in the process `by` places before."""
    assert isinstance(leaf.sharding, NamedSharding)
    return _mover(leaf.sharding.mesh, leaf.sharding.spec, by)(leaf)


@functools.cache
def _mover(mesh: jax.sharding.Mesh, spec: PartitionSpec, by: int) -> Any:
    number = {device: i for i, device in enumerate(mesh.devices.flat)}
    pairs = [(number[source], number[target]) for target, source in _ring(mesh, by).items()]

    def move(part: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        return jax.lax.ppermute(part, mesh.axis_names, pairs)

    return jax.jit(jax.shard_map(move, mesh=mesh, in_specs=(spec,), out_specs=spec, check_vma=False))


def _returned(own: Leaves, copies: Leaves, complete: Sequence[bool]) -> Leaves:
    """The parts of processes that have them, and for the others the copies that the process after each has."""
    mesh, specs = _mesh(own), {path: leaf.sharding.spec for path, leaf in own.items()}
    everywhere = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    flags = [jax.device_put(np.asarray([complete[d.process_index]]), d) for d in mesh.local_devices]
    has_own = jax.make_array_from_single_device_arrays((mesh.size,), everywhere, flags)

    def choose(has_own: Array, own: Leaves, back: Leaves) -> Leaves:
        return {path: jax.numpy.where(has_own[0], own[path], back[path]) for path in own}

    chosen = jax.shard_map(
        choose, mesh=mesh, in_specs=(everywhere.spec, specs, specs), out_specs=specs, check_vma=False
    )
    return jax.jit(chosen)(has_own, own, {path: _moved(leaf, -1) for path, leaf in copies.items()})
