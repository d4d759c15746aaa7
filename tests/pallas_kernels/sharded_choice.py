"""Rows over the two devices of a mesh, experts alike for all: the numbers of XLA on one. Run as a program."""

import functools
import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from jax.sharding import PartitionSpec as P

from pallas_kernels.choice import attention_shares
from tests.pallas_kernels.base import assert_close
from tests.pallas_kernels.test_choice import Shape, inputs_of


def main() -> None:
    devices = jax.devices()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    (query, query_expert, chunk_key, expert_key), available, cotangent = inputs_of(Shape(rows=2, tokens=8))

    def run(query, query_expert, chunk_key, available, cotangent, expert_key, implementation="pallas_tpu", axis="data"):
        def loss(query, expert_key):
            arrays = query, query_expert, chunk_key, expert_key, available
            share, *queries = attention_shares(*arrays, precision="highest", implementation=implementation)
            return (share * cotangent).sum() + sum(x.sum() for x in queries), share

        (of_query, gradient), share = jax.grad(loss, (0, 1), has_aux=True)(query, expert_key)
        return gradient if axis is None else jax.lax.psum(gradient, axis), share, of_query

    over = functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(*[P("data")] * 5, P()),
        out_specs=(P(), P("data"), P("data")),
        check_vma=False,
    )
    given = query, query_expert, chunk_key, available, cotangent, expert_key
    # The interpreter does not follow the check of varying axes; lowered for a TPU, the kernels pass it.
    checked = functools.partial(run, axis=None)
    spread = jax.shard_map(checked, mesh=mesh, in_specs=(*[P("data")] * 5, P()), out_specs=(P(), P("data"), P("data")))
    jax.jit(spread).trace(*given).lower(lowering_platforms=("tpu",))
    actual, expected = jax.jit(over(run))(*given), run(*given, implementation="xla", axis=None)
    assert len(actual[1].sharding.device_set) == 2
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-5, "on a mesh"), actual, expected)
    print(len(devices), "devices agree")


if __name__ == "__main__":
    main()
