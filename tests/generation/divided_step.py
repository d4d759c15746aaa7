"""One step of decoding, compiled for a TPU slice that is not there, its parameters divided over a mesh. Prints JSON:
bytes of the parameters, of the arguments of one device, and the collectives of the program."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from aamoe_jax.config import ExperimentConfig, MeshConfig
from aamoe_jax.generation import decoder
from aamoe_jax.training.state import abstract_params, place_params
from pallas_kernels import aot
from tests.training.helpers import model_config

ROWS, LENGTH = 2, 256


def main(topology: str, mesh: str) -> None:
    model = model_config("aamoe", num_layers=2, d_model=1024, num_heads=8, vocab_size=32_768, dtype="bfloat16")
    sizes = MeshConfig(*map(int, mesh.split("x")))
    config = dataclasses.replace(ExperimentConfig(model=model), mesh=sizes)
    placement = place_params(config, aot.topology(topology).devices)
    params = abstract_params(model, placement)

    def period(x: Any) -> Any:
        at = NamedSharding(placement.mesh, PartitionSpec(*x.sharding.spec[1:]))
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=at)

    plan = decoder.Plan(model, "prefix", 1.0, LENGTH)
    periods = [jax.tree.map(period, params["periods"])] * model.periods
    ends = {name: part for name, part in params.items() if name != "periods"}
    empty = jax.eval_shape(lambda *params: decoder._empty_caches(plan, *params, ROWS), ends, periods[0])
    caches = [empty] * model.periods
    shape = jax.ShapeDtypeStruct
    state = decoder.State(caches, shape((ROWS,), jnp.int32), shape((ROWS, model.vocab_size), jnp.float32))
    arguments = decoder.Parameters(ends, periods), state, shape((ROWS,), jnp.int32), shape((), jnp.float32)
    compiled = decoder._append.lower(plan, *arguments).compile()
    found = {
        "parameters": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((ends, periods))),
        "arguments": compiled.memory_analysis().argument_size_in_bytes,
        "collectives": sorted(set(re.findall(r" (all-\w+|reduce-scatter|collective-permute)\(", compiled.as_text()))),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
