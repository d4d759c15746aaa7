"""What small models send on a few meshes of 8 devices: compiled, not run. Used by test_meshes.py.

python -m tests.sharding.sent
"""

from __future__ import annotations

import json

import jax

from benchmarks.meshes import SMALL, compiled_on, over, sent_by
from experiments.binding import load_experiment

MORE_WORDS = "ModelConfig.vocab_size = 256"
FEW = "AAMoEConfig.max_resources = 4"
MIXTURE = ("ModelConfig.pattern = ('moe',)", "ModelConfig.num_layers = 1")
CASES = {
    "1x1x4x2": (FEW,),
    "1x1x4x2, more experts and words": (FEW, "AAMoEConfig.num_experts = 80", MORE_WORDS),
    "1x4x1x2": (),
    "1x4x1x2, more words": (MORE_WORDS,),
    "1x2x2x2": (),
    "1x2x2x2, deeper": ("ModelConfig.num_layers = 4",),
    "1x1x4x2, experts": MIXTURE,
    "1x1x4x2, experts with a capacity": (*MIXTURE, "MoEConfig.shard_capacity = 1.0"),
}
"""The mesh, and what else tells the case from others: bindings."""


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    found = {}
    for name, bindings in CASES.items():
        mesh = tuple(map(int, name.split(",")[0].split("x")))
        compiled, _ = compiled_on(over(load_experiment((), [*SMALL, *bindings]), mesh), jax.devices())
        found[name] = sent_by(compiled, mesh)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
