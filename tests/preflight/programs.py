"""Prints the compiled text of small programs over eight devices of the CPU, as JSON by mesh: run as a process."""

import json
import os
import sys

if __name__ == "__main__":  # the tests import this file for its sizes, and start other programs
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "resource", "tensor")
LAYERS, WIDTH, ROWS = 3, 64, 128


def layer(x, weight):
    """x [rows, WIDTH / tensor]: gathered weights, one product, the sum over `tensor` scattered."""
    whole = jax.lax.all_gather(weight, "fsdp", axis=0, tiled=True)
    return jax.lax.psum_scatter(jnp.tanh(x) @ whole, "tensor", scatter_dimension=1, tiled=True), None


def program(mesh):
    """Layers in a scan, then the sum over all rows."""

    def loss(weights, x):
        x, _ = jax.lax.scan(layer, x, weights)
        return jax.lax.psum(x.sum(), ("data", "fsdp", "tensor"))

    weights, rows = PartitionSpec(None, ("tensor", "fsdp"), None), PartitionSpec(("data", "fsdp"), "tensor")
    divided = jax.shard_map(loss, mesh=mesh, in_specs=(weights, rows), out_specs=PartitionSpec(), check_vma=False)
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((LAYERS, WIDTH, WIDTH), weights), ((ROWS, WIDTH), rows))
    ]
    return jax.jit(divided).lower(*shapes).compile().as_text()


if __name__ == "__main__":
    texts = {}
    for sizes in ((1, 8, 1, 1), (2, 2, 1, 2), (1, 2, 1, 4), (4, 1, 1, 2)):
        mesh = jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 4)
        texts[" ".join(map(str, sizes))] = program(mesh)
    json.dump(texts, sys.stdout)
