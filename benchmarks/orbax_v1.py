"""What the second version of Orbax's interface does with checkpoints, whole and damaged (docs/libraries.md).

  python -m benchmarks.orbax_v1

Saves a small tree in a few steps, loads it again, and damages copies of it: one bit, half of a file, all of a file.
"""

from __future__ import annotations

import importlib.metadata
import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from absl import flags
from orbax.checkpoint.experimental import v1 as ocp

from aamoe_jax.config import first_line
from experiments.program import plain_table, start

FLAGS = flags.FLAGS
SIZE = 256
LOSSES = {10: 3.0, 20: 1.0, 30: 2.0, 40: 2.5}
"""Validation loss at every step that is saved."""
SAFETENSORS = ocp.options.CheckpointLayout.SAFETENSORS

Tree = dict[str, Any]


def define_flags() -> None:
    """The flags of this program."""
    flags.DEFINE_integer("trials", 40, "How many times a bit is flipped.", lower_bound=1)


def tree_of(step: int) -> Tree:
    """Numbers that no compression makes smaller, and none of them 0: a file that is lost reads as zeros."""
    numbers = np.random.default_rng(step).integers(1, 2**32, (SIZE, SIZE), np.uint32)
    return {"params": {"w": jnp.asarray(numbers)}, "optimizer": {"mu": jnp.full((7,), step, jnp.bfloat16)}}


def checkpointer(folder: Path) -> ocp.training.Checkpointer:
    """One that keeps the two newest checkpoints and the best."""
    policies = ocp.training.preservation_policies
    best = policies.BestN(get_metric_fn=lambda metrics: metrics["loss"], reverse=True, n=1)
    return ocp.training.Checkpointer(
        folder,
        save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
        preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(2), best]),
    )


def save(folder: Path) -> list[int]:
    """Saves all steps beside each other; returns those that are kept."""
    with checkpointer(folder) as store:
        for step, loss in LOSSES.items():
            store.save_checkpointables_async(step, {**tree_of(step), "meta": {"step": step}}, metrics={"loss": loss})
        store.wait()
        return [checkpoint.step for checkpoint in store.checkpoints]


def load(folder: Path) -> str:
    """What comes of loading the newest checkpoint."""
    step = max(LOSSES)
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree_of(step))
    try:
        with checkpointer(folder) as store:
            found = store.load_checkpointables(step, like)
    except Exception as error:  # bare ones too
        return f"{type(error).__name__}: {first_line(error)[:60]}"
    same = jax.tree.map(lambda one, other: np.array_equal(np.asarray(one), np.asarray(other)), found, tree_of(step))
    return "equal bits" if jax.tree.all(same) else "other numbers, no error"


def damaged(good: Path, victim: Path, damage: Callable[[Path], object]) -> str:
    """What comes of loading a copy of a folder, in which a file is damaged."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(good, Path(folder) / "run")
        damage(copy / victim)
        return load(copy)


def flips(good: Path, trials: int) -> Iterator[str]:
    """The same of a random bit of the largest file of the newest checkpoint, again and again."""
    newest = good / str(max(LOSSES))
    victim = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    for trial in range(trials):

        def flip(path: Path, seed: int = trial) -> None:
            data = bytearray(path.read_bytes())
            data[np.random.default_rng(seed).integers(len(data))] ^= 1 << seed % 8
            path.write_bytes(data)

        yield damaged(good, victim.relative_to(good), flip)


def safetensors_results(folder: Path) -> tuple[str, str]:
    """What comes of loading and of saving in the format of safetensors."""
    folder.mkdir()
    safetensors.numpy.save_file({"w": np.ones(3, np.float32)}, folder / "model.safetensors")
    results = []
    with ocp.Context(checkpoint_layout=SAFETENSORS):
        for attempt in (lambda: ocp.load(folder), lambda: ocp.save(folder.parent / "saved", {"w": jnp.ones(3)})):
            try:
                attempt()
                results.append("works")
            except NotImplementedError as error:
                results.append(first_line(error))
    return results[0], results[1]


def main() -> None:
    """Prints one line for each thing that was tried."""
    logging.disable(logging.ERROR)  # tracebacks of the errors that are also raised
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        good = Path(folder) / "run"
        kept = save(good)
        newest = good / str(max(LOSSES))
        rows = [
            ("save beside training, keep two and the best", f"kept {kept} of {list(LOSSES)}"),
            ("load", load(good)),
        ]
        outcomes = list(flips(good, FLAGS.trials))
        rows += [
            (f"one bit flipped, {outcomes.count(one)} of {FLAGS.trials} times", one) for one in sorted(set(outcomes))
        ]
        files = sorted(path.relative_to(good) for path in (newest / "params").rglob("*") if path.is_file())
        for file in [Path(newest.name) / "commit_success.txt", *files]:
            name = "/".join(part if len(part) < 32 else "*" for part in file.parts)
            rows.append((f"{name} lost", damaged(good, file, Path.unlink)))
        for what, result in zip(("load", "save"), safetensors_results(Path(folder) / "safetensors"), strict=True):
            rows.append((f"{what} safetensors", result))
    print(f"orbax-checkpoint {importlib.metadata.version('orbax-checkpoint')}")
    print(plain_table(("what", "result"), "ll", rows))


if __name__ == "__main__":
    start(define_flags, main)
