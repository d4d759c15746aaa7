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
    """The library's mixers: those of the golden file as they are counted there, then new ones."""
    own = {name for name, entry in MIXERS.items() if entry.cls.__module__.startswith("aamoe_jax.")}
    blocks = re.findall(r"periods/blocks/(\d+)_(\w+)/", GOLDEN.read_text())
    known = [name for _, name in sorted({(int(index), name) for index, name in blocks})]
    return known + sorted(own - set(known))


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
            ({"slices": 0}, "MeshConfig.slices = 0: must be at least 1, or None"),
        ],
    )
    def test_sizes_that_make_no_sense(self, fields, message):
        with pytest.raises(ConfigError, match=message):
            MeshConfig(**fields)


class Fake:
    """Passes for a device where types are checked."""

    @property
    def __class__(self) -> type:
        return jax.Device


@dataclasses.dataclass(frozen=True)
class FakeTpu(Fake):
    """A v5p of several slices of 2x2x4 chips."""

    id: int
    slice_index: int
    coords: tuple[int, int, int]
    process_index: int = 0
    core_on_chip: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5"


def fake_slices(count: int) -> list[FakeTpu]:
    """Of 16 chips each, in no order."""
    places = [(index, x, y, z) for z in range(4) for x in range(2) for index in range(count) for y in range(2)]
    return [FakeTpu(number, index, tuple(place)) for number, (index, *place) in enumerate(places)]


@dataclasses.dataclass(frozen=True)
class FakeCpu(Fake):
    id: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"


class TestSlices:
    @pytest.mark.parametrize(("data", "slices"), [(2, None), (4, 2), (-1, None)])
    def test_data_goes_over_them_first(self, data, slices):
        fsdp = 4 if data == -1 else -1
        mesh = make_mesh(MeshConfig(data=data, fsdp=fsdp, tensor=2, slices=slices), fake_slices(2))
        assert mesh.devices.size == 32
        assert mesh.shape["tensor"] == 2
        first, second = np.split(mesh.devices, 2)
        assert {device.slice_index for device in first.flat} == {0}
        assert {device.slice_index for device in second.flat} == {1}

    def test_within_a_slice_the_mesh_is_that_of_a_slice(self):
        config = MeshConfig(data=2, fsdp=4, tensor=4)
        alone = make_mesh(dataclasses.replace(config, data=1), [d for d in fake_slices(2) if d.slice_index == 1])
        np.testing.assert_array_equal(make_mesh(config, fake_slices(2)).devices[1:], alone.devices)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            (
                {"fsdp": 32},
                "MeshConfig.data = 1: must be a multiple of 2, the number of slices: .* MeshConfig.data = 2",
            ),
            ({"data": 4, "slices": 4}, "MeshConfig.slices = 4: the devices are of 2: give that, or None"),
            ({"data": 2, "slices": 1}, "MeshConfig.slices = 1: the devices are of 2"),
        ],
    )
    def test_what_does_not_fit_them_is_refused(self, fields, message):
        with pytest.raises(ConfigError, match=message):
            make_mesh(MeshConfig(**fields), fake_slices(2))

    def test_one_slice_is_not_two(self):
        with pytest.raises(ConfigError, match=r"MeshConfig.slices = 2: the devices are of 1"):
            make_mesh(MeshConfig(data=2, slices=2), fake_slices(1))

    def test_devices_without_slices_are_taken_host_by_host(self):
        devices = [FakeCpu(number, process) for number, process in zip(range(8), [3, 2, 1, 0, 3, 2, 1, 0], strict=True)]
        mesh = make_mesh(MeshConfig(data=2, slices=2), devices)
        assert [[d.process_index for d in part.flat] for part in mesh.devices] == [[0, 0, 1, 1], [2, 2, 3, 3]]
        with pytest.raises(ConfigError, match=r"MeshConfig.slices = 3: 8 devices do not make so many equal slices"):
            make_mesh(MeshConfig(data=-1, fsdp=1, slices=3), devices)


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
