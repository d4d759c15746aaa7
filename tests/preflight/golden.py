"""What the TPU compiler makes of a small training step on big slices: `python -m tests.preflight.golden` notes it."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

from aamoe_jax.config import (
    AAMoEConfig,
    BudgetConfig,
    DataConfig,
    ExperimentConfig,
    MeshConfig,
    ModelConfig,
    TrainingConfig,
)
from aamoe_jax.preflight.program import compile_apart
from aamoe_jax.preflight.summary import Summary

FILE = Path(__file__).with_name("golden.json")
COMMAND = "python -m tests.preflight.golden"
MESHES = {
    "v5e:16x16": MeshConfig(data=16, fsdp=16),
    "v5p:8x8x8": MeshConfig(data=8, fsdp=8, resource=8),
    "v6e:16x16": MeshConfig(fsdp=16, resource=16),
    "tpu7x:4x4x4": MeshConfig(data=4, fsdp=4, resource=4, tensor=2),
}


def experiment(mesh: MeshConfig, **model: Any) -> ExperimentConfig:
    """Two layers, one row of 1024 tokens for every part of the batch."""
    layer = AAMoEConfig(chunk_size=64, num_experts=32, max_resources=8, budget=BudgetConfig(beta=4.0))
    shape = {"vocab_size": 512, "d_model": 256, "num_heads": 2, "num_layers": 2, "dtype": "bfloat16", "remat": "full"}
    return ExperimentConfig(
        model=ModelConfig(aamoe=layer, **shape | model),
        data=DataConfig(seq_len=1024),
        training=TrainingConfig(batch_size=mesh.data * mesh.fsdp),
        mesh=mesh,
    )


def compiled(topology: str) -> dict[str, Any]:
    """The figures of a slice that the golden file holds."""
    return figures(compile_apart(experiment(MESHES[topology]), topology, "train", "placed"))


def figures(summary: Summary) -> dict[str, Any]:
    """Those that change when the program does."""
    return {
        "devices": summary.devices,
        "arguments": summary.memory.arguments,
        "temporaries": summary.memory.temporaries,
        "moved_bytes": summary.moved_bytes,
        "product_flops": summary.product_flops,
        "collectives": {
            f"{part.collective.kind} {' '.join(part.collective.axes)}": [part.collective.count, part.collective.sent]
            for part in summary.network
        },
        "kernels": {kernel.name: kernel.times for kernel in summary.kernels},
    }


def main() -> None:
    golden = {"libtpu": importlib.metadata.version("libtpu")} | {name: compiled(name) for name in MESHES}
    FILE.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
