"""Loss and gradients of one mesh over real processes, against one device: run by test_meshes.py, once per process.

python -m tests.sharding.processes PORT PROCESSES INDEX DEVICES MESH
"""

from __future__ import annotations

import dataclasses
import json
import sys

import jax

from benchmarks.meshes import SMALL, compiled_on, gradients_of, measure, on_one_device, over
from experiments.binding import load_experiment


def main(port: str, processes: int, index: int, devices: int, mesh: str) -> None:
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", processes, index, heartbeat_timeout_seconds=30)
    config = load_experiment((), SMALL)
    sizes = tuple(map(int, mesh.split("x")))
    if index == 0:  # to know what one device finds, one process is enough
        row = measure(config, sizes, on_one_device(config))
        print(json.dumps({"devices": jax.device_count(), **dataclasses.asdict(row)}))
    else:
        gradients_of(*compiled_on(over(config, sizes), jax.devices()))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5])
