"""Sequences over the two devices of a mesh, experts on both: the numbers of XLA on one. Run as a program."""

import functools
import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_kernels.block_sparse_attention import Slots, paged_attention

ROWS, PAGES, M, EXPERTS, HEADS, SIZE, SLOTS = 4, 3, 8, 2, 2, 16, 3


def main() -> None:
    devices, rng = jax.devices(), np.random.default_rng(0)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    normal = lambda *size: jnp.asarray(rng.normal(size=(*size, HEADS, SIZE)), jnp.float32)  # noqa: E731
    arrays = (
        normal(ROWS),
        normal(ROWS),
        *(normal(ROWS, PAGES, M) for _ in range(2)),
        *(normal(EXPERTS, M) for _ in range(2)),
    )
    resource = np.stack([rng.permutation(PAGES + EXPERTS)[:SLOTS] for _ in range(ROWS)]).astype(np.int32)
    begin, end = np.zeros_like(resource), np.full_like(resource, M)
    slots = Slots(resource, np.float32(rng.normal(size=resource.shape)), begin, end, np.array([3, 0, 1, 2], np.int32))
    given = *arrays, jax.tree.map(jnp.asarray, slots)

    def run(*given, implementation="pallas_tpu"):
        return paged_attention(*given, norm_expert_key=lambda key: 0.5 * key, implementation=implementation)

    specs = (*[P("data")] * 4, P(), P(), Slots(*[P("data")] * 5))
    over = functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=P("data"))
    # The interpreter does not follow the check of varying axes; lowered for a TPU, the kernel passes it.
    jax.jit(over(run)).trace(*given).lower(lowering_platforms=("tpu",))
    actual = jax.jit(over(run, check_vma=False))(*given)
    assert len(actual[0].sharding.device_set) == 2
    wanted = run(*given, implementation="xla")
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), actual, wanted)
    print(len(devices), "devices agree")


if __name__ == "__main__":
    main()
