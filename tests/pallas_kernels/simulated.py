"""Kernels for TPUs as they are compiled, in simulated memory; and modules with a bug put in, which that must notice."""

import contextlib
import inspect
import types
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from jax.experimental.pallas import tpu as pltpu

from experiments.held import Bug


@contextlib.contextmanager
def as_compiled(module: ModuleType, monkeypatch, cores: int = 1, **options: Any) -> Iterator[None]:
    """Kernels of a module run as they are compiled: nothing is read before it has arrived, or overwritten before it was
    read, or RACE DETECTED is printed; what was never written is NaN.

    Args:
      **options: of `pltpu.InterpretParams`.
    """
    compiled = lambda kernel, *arrays, **options: kernel(*arrays, **options, interpret=False)  # noqa: E731
    monkeypatch.setattr(module, "compiled_or_interpreted", compiled)
    simulated = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=cores, **options)
    with pltpu.force_tpu_interpret_mode(simulated):
        yield


def with_bug(module: ModuleType, text: str, becomes: str) -> ModuleType:
    """The module again, with the bug.

    Raises:
      ValueError: the text does not stand there exactly once.
    """
    source = Bug("", str(module.__file__), text, becomes, ()).applied(inspect.getsource(module))
    changed = types.ModuleType(module.__name__)
    changed.__dict__.update({"__file__": module.__file__, "__package__": module.__package__})
    exec(compile(source, str(module.__file__), "exec"), changed.__dict__)
    return changed
