"""The mesh and the typed rules: where every parameter lies, what is refused, and with which words."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from aamoe_jax.config import (
    AAMoEConfig,
    BudgetConfig,
    ConfigError,
    DataConfig,
    ExperimentConfig,
    MeshConfig,
    ModelConfig,
    TrainingConfig,
)
from aamoe_jax.registry import MIXERS
from aamoe_jax.sharding import ShardingRules, make_mesh, parameter_specs, require_divisible
from aamoe_jax.shards import AXES
from aamoe_jax.training.state import place

GOLDEN = Path(__file__).parent / "golden" / "parameters.json"
"""Written by `python -m tests.sharding.test_rules`; a change of where a parameter lies is meant to be seen."""


def everything() -> ModelConfig:
    """A model with every parameter that there is."""
    budget = BudgetConfig(normalizer="row")
    aamoe = AAMoEConfig(chunk_size=8, num_experts=4, null_slot="learned", budget=budget)
    return ModelConfig(d_model=32, num_heads=4, num_layers=1, pattern=("+".join(in_golden_order()),), aamoe=aamoe)


def in_golden_order() -> list[str]:
    """All mixers: those of the golden file as they are counted there, then new ones."""
    blocks = re.findall(r"periods/blocks/(\d+)_(\w+)/", GOLDEN.read_text())
    known = [name for _, name in sorted({(int(index), name) for index, name in blocks})]
    return known + sorted(set(MIXERS) - set(known))


def placed() -> dict[str, list]:
    """Path -> the axes of every dimension."""
    leaves = jax.tree_util.tree_leaves_with_path(parameter_specs(everything()))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): json.loads(json.dumps(list(spec)))
        for path, spec in leaves
    }


def sizes_of(*sizes: int) -> dict[str, int]:
    return dict(zip(AXES, sizes, strict=True))


def experiment(**changes) -> ExperimentConfig:
    aamoe = AAMoEConfig(chunk_size=8, num_experts=4)
    model = ModelConfig(vocab_size=64, d_model=32, num_heads=4, num_layers=1, aamoe=aamoe)
    config = ExperimentConfig(
        model=model, data=DataConfig(seq_len=64, document_align=8), training=TrainingConfig(batch_size=4)
    )
    return dataclasses.replace(config, **changes)


class TestRules:
    def test_every_parameter_lies_where_it_lay(self):
        assert placed() == json.loads(GOLDEN.read_text())

    def test_two_dimensions_on_one_axis_collide(self):
        with pytest.raises(ValueError, match=r"\('heads', 'tokens'\) are divided over 'tensor' twice"):
            ShardingRules().spec("heads", "tokens")

    def test_unknown_dimensions_and_axes_are_refused(self):
        with pytest.raises(ValueError, match="'head' is no rule; there are rows, tokens"):
            ShardingRules().spec("head")
        with pytest.raises(ValueError, match=r"ShardingRules.heads: 'model' is no axis; there are data, fsdp"):
            ShardingRules(heads=("model",))


class TestMesh:
    def test_one_axis_takes_what_is_left(self):
        mesh = make_mesh(MeshConfig(data=1, fsdp=-1), jax.devices()[:1])
        assert mesh.shape == {"data": 1, "fsdp": 1, "resource": 1, "tensor": 1}

    @pytest.mark.parametrize("mesh", [MeshConfig(fsdp=2), MeshConfig(data=2, tensor=3)])
    def test_a_product_that_is_not_the_devices(self, mesh):
        with pytest.raises(ConfigError, match=r"MeshConfig: .* does not make 1 devices: .* MeshConfig.fsdp = -1"):
            make_mesh(mesh, jax.devices()[:1])

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"data": 0}, "MeshConfig.data = 0: must be at least 1, or -1"),
            ({"data": -1}, "MeshConfig.data = -1: only one axis can take"),
            ({"pair_bound": 0.5}, "MeshConfig.pair_bound = 0.5: must be at least 1"),
        ],
    )
    def test_sizes_that_make_no_sense(self, fields, message):
        with pytest.raises(ConfigError, match=message):
            MeshConfig(**fields)


class TestDivisible:
    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            (
                (3, 1, 1, 1),
                r"TrainingConfig.batch_size / accumulate = 4: must be divisible by 3, the mesh's data x fsdp",
            ),
            ((1, 1, 3, 1), r"DataConfig.seq_len = 64: must be divisible by 3, the mesh's resource x tensor"),
            ((1, 1, 16, 1), r"AAMoEConfig.num_experts = 4: must be divisible by 16, the mesh's resource"),
            ((1, 1, 1, 8), r"ModelConfig.num_heads = 4: must be divisible by 8, the mesh's tensor"),
        ],
    )
    def test_names_field_value_and_divisor(self, sizes, message):
        with pytest.raises(ConfigError, match=message):
            require_divisible(experiment(), sizes_of(*sizes))

    def test_parts_of_rows_are_whole_chunks(self):
        data = DataConfig(seq_len=96, document_align=8)
        model = dataclasses.replace(experiment().model, aamoe=AAMoEConfig(chunk_size=8, num_experts=8))
        with pytest.raises(
            ConfigError, match=r"seq_len = 96: must be divisible by 64, .*AAMoEConfig.chunk_size x resource"
        ):
            require_divisible(experiment(model=model, data=data), sizes_of(1, 1, 8, 1))

    def test_a_parameter_that_cannot_be_stored(self):
        training = TrainingConfig(batch_size=16)
        with pytest.raises(ConfigError, match=r"MeshConfig.fsdp = 16: parameter .*expert_keys of shape .* along its 8"):
            require_divisible(experiment(training=training), sizes_of(1, 16, 1, 1))


class TestPlacement:
    def test_a_single_process_loads_all_rows(self):
        placement = place(experiment(), jax.devices()[:1])
        assert placement.shard(4) == (0, 1)
        batch = {"tokens": np.arange(8, dtype=np.int32).reshape(4, 2)}
        np.testing.assert_array_equal(placement.put(batch)["tokens"], batch["tokens"])


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(placed(), indent=1) + "\n")
