"""Rows over the two devices of a mesh, one scale for all: the numbers of one device. Run as a program."""

import functools
import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from jax.sharding import PartitionSpec as P

from pallas_kernels.rotary import norm_rotary
from tests.pallas_kernels.base import assert_close
from tests.pallas_kernels.test_rotary import inputs_of


def main() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x, scale, angles, cotangents = inputs_of(2, 64, 2, 128)

    def run(x, angles, cotangents, scale, axis="data"):
        def loss(x, scale):
            found = norm_rotary(x, 128, scale, angles)
            return sum((y * cotangent).sum() for y, cotangent in zip(found, cotangents, strict=True)), found

        (d_x, d_scale), found = jax.grad(loss, (0, 1), has_aux=True)(x, scale)
        return d_x, d_scale if axis is None else jax.lax.psum(d_scale, axis), found

    given = x, angles, cotangents, scale
    specs = {"mesh": mesh, "in_specs": (P("data"), P("data"), P("data"), P()), "out_specs": (P("data"), P(), P("data"))}
    # The interpreter does not follow the check of varying axes; lowered for a TPU, the kernels pass it.
    spread = jax.jit(jax.shard_map(functools.partial(run, axis=None), **specs))
    spread.trace(*given).lower(lowering_platforms=("tpu",))
    actual = jax.jit(jax.shard_map(run, check_vma=False, **specs))(*given)
    assert len(actual[0].sharding.device_set) == 2
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-5, "on a mesh"), actual, run(*given, axis=None))
    print(len(jax.devices()), "devices agree")


if __name__ == "__main__":
    main()
