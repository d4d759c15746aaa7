"""Tokens over the two devices of a mesh, counts alike for all: the numbers of XLA on one. Run as a program."""

import functools
import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_kernels.selection import select


def main() -> None:
    devices = jax.devices()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(0)
    score = rng.integers(0, 5, (2, 10, 9)).astype(np.float32)
    count, cotangent = rng.integers(0, 4, (1, 10)), rng.normal(size=(2, 10, 3)).astype(np.float32)

    def run(score, count, cotangent, implementation="pallas_tpu"):
        count = count.repeat(len(score), axis=0)
        choose = lambda score: select(score, 3, count, implementation=implementation)  # noqa: E731
        _, pull = jax.vjp(lambda score: choose(score).score, score)
        return choose(score), pull(cotangent)[0]

    over = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=P("data"))
    # The interpreter does not follow the check of varying axes; lowered for a TPU, the kernel passes it.
    jax.jit(over(run)).trace(score, count, cotangent).lower(lowering_platforms=("tpu",))
    spread = over(run, check_vma=False)
    actual = jax.jit(spread)(score, count, cotangent)
    assert len(actual[1].sharding.device_set) == 2
    jax.tree.map(np.testing.assert_array_equal, actual, run(score, count, cotangent, "xla"))
    print(len(devices), "devices agree")


if __name__ == "__main__":
    main()
