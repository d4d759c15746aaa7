"""The schema: defaults fit together, what cannot work is refused by name, and a trip through JSON loses nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import get_args

import jaxtyping
import pytest

from aamoe_jax.config import (
    AAMoEConfig,
    BudgetConfig,
    ConfigError,
    DataConfig,
    ExperimentConfig,
    Kernel,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
    from_dict,
    to_dict,
)
from aamoe_jax.mixers.clustered import ClusteredAttentionConfig
from aamoe_jax.mixers.experts import MoEConfig
from aamoe_jax.mixers.filtered import FilteredAttentionConfig
from aamoe_jax.mixers.sparse_attention import SparseAttentionConfig
from aamoe_jax.training.checkpoints import load_checkpoint
from pallas_kernels.block_sparse_attention import IMPLEMENTATIONS


@pytest.fixture(autouse=True)
def as_users_run_it():
    """Outside the tests nobody checks annotations at run time, so the dataclasses have to refuse by themselves."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


class TestRefusals:
    @pytest.mark.parametrize(
        ("cls", "values", "field", "wanted"),
        [
            (BudgetConfig, {"beta": 0.0}, "beta", "must be a positive number, or one per layer"),
            (BudgetConfig, {"beta": ()}, "beta", "must be a positive number"),
            (BudgetConfig, {"beta": (1.0, -1.0)}, "beta", "must be a positive number"),
            (BudgetConfig, {"beta": float("inf")}, "beta", "must be a positive number"),
            (BudgetConfig, {"normalizer": "column"}, "normalizer", "must be one of 'row', 'prefix'"),
            (BudgetConfig, {"slack": -1}, "slack", "must be at least 0"),
            (AAMoEConfig, {"chunk_size": 0}, "chunk_size", "must be a positive number"),
            (AAMoEConfig, {"num_experts": -1}, "num_experts", "must be at least 0"),
            (AAMoEConfig, {"context": "all"}, "context", "must be one of 'routed', 'none'"),
            (AAMoEConfig, {"local": "near"}, "local", "must be one of 'window', 'chunk', 'routed', 'none'"),
            (AAMoEConfig, {"router": "absolute"}, "router", "must be one of 'learned', 'learned_nope', 'pooled'"),
            (AAMoEConfig, {"router": "pooled", "pooled_keys": 3}, "pooled_keys", "must divide chunk_size = 64"),
            (AAMoEConfig, {"router": "pooled", "local": "routed"}, "local", "the own chunk has no pooled keys"),
            (AAMoEConfig, {"bias": "learned"}, "bias", "must be one of 'log_prob', 'none'"),
            (AAMoEConfig, {"null_slot": "zero"}, "null_slot", "must be one of 'none', 'learned'"),
            (AAMoEConfig, {"max_resources": 0}, "max_resources", "must be at least 1, or None for all"),
            (AAMoEConfig, {"context": "none", "num_experts": 0, "local": "none"}, "num_experts", "at least one expert"),
            (AAMoEConfig, {"context": "none", "local": "routed"}, "local", "the own chunk cannot be routed"),
            (FilteredAttentionConfig, {"filter": "loud"}, "filter", "must be one of 'none', 'message_norm', 'learned'"),
            (FilteredAttentionConfig, {"threshold": -0.1}, "threshold", "must be a number of at least 0"),
            (FilteredAttentionConfig, {"capacity": 0.0}, "capacity", "must be in (0, 1]"),
            (ClusteredAttentionConfig, {"clusters": 0}, "clusters", "must be a positive number"),
            (ClusteredAttentionConfig, {"clusters_kept": 17}, "clusters_kept", "must be at most clusters = 16"),
            (ModelConfig, {"num_layers": 0}, "num_layers", "must be a positive number"),
            (ModelConfig, {"d_model": 30}, "d_model", "must be divisible by num_heads = 4"),
            (ModelConfig, {"d_model": 12}, "d_model", "must be even"),
            (ModelConfig, {"pattern": ()}, "pattern", "must name at least one mixer"),
            (ModelConfig, {"pattern": ("dense",)}, "pattern", "'dense' is no mixer; there are aamoe, "),
            (ModelConfig, {"pattern": ("aamoe",) * 3}, "pattern", "comes to 3 layers, which do not divide num_layers"),
            (ModelConfig, {"num_kv_heads": 0}, "num_kv_heads", "must divide num_heads = 4"),
            (ModelConfig, {"num_kv_heads": 3}, "num_kv_heads", "must divide num_heads = 4"),
            (ModelConfig, {"d_ff": 0}, "d_ff", "must be at least 1, or None for 4 * d_model"),
            (ModelConfig, {"norm": "batch"}, "norm", "must be one of 'rms', 'layer'"),
            (ModelConfig, {"dtype": "float16"}, "dtype", "must be one of 'float32', 'bfloat16'"),
            (DataConfig, {"seq_len": 0}, "seq_len", "must be a positive number"),
            (DataConfig, {"mixture": ()}, "mixture", "must name at least one dataset"),
            (DataConfig, {"mixture": (("code", 0.0),)}, "mixture", "every entry is (name, weight)"),
            (DataConfig, {"mixture": ("code",)}, "mixture", "every entry is (name, weight)"),
            (OptimizerConfig, {"learning_rate": 0.0}, "learning_rate", "must be a positive number"),
            (OptimizerConfig, {"schedule": "linear"}, "schedule", "must be one of 'cosine', 'wsd'"),
            (OptimizerConfig, {"warmup_steps": -1}, "warmup_steps", "must be at least 0"),
            (OptimizerConfig, {"beta2": 1.0}, "beta2", "must be in [0, 1)"),
            (OptimizerConfig, {"decay_fraction": 1.5}, "decay_fraction", "must be in [0, 1]"),
            (OptimizerConfig, {"weight_decay": -1.0}, "weight_decay", "must be at least 0"),
            (TrainingConfig, {"steps": 0}, "steps", "must be a positive number"),
            (TrainingConfig, {"batch_size": 8, "accumulate": 3}, "accumulate", "must divide batch_size = 8"),
            (TrainingConfig, {"eval_every": -1}, "eval_every", "must be at least 0"),
            (TrainingConfig, {"trackers": ("neptune",)}, "trackers", "must be of 'tensorboard', 'wandb', 'mlflow'"),
        ],
    )
    def test_name_field_value_and_what_is_wanted(self, cls, values, field, wanted):
        with pytest.raises(ConfigError) as caught:
            cls(**values)
        message = str(caught.value)
        value = values.get(field, cls.__dataclass_fields__[field].default)
        assert message.startswith(f"{cls.__name__}.{field} = {value!r}: ")
        assert wanted in message

    def test_a_budget_per_layer_needs_one_value_for_each(self):
        layer = AAMoEConfig(budget=BudgetConfig(beta=(1.0, 2.0)))
        with pytest.raises(ConfigError, match="2 values for num_layers = 4"):
            ModelConfig(aamoe=layer)
        assert ModelConfig(aamoe=layer, num_layers=2).betas == (1.0, 2.0)

    def test_rows_and_documents_must_fit_the_chunks(self):
        with pytest.raises(ConfigError, match=r"^DataConfig\.seq_len = 32: .* AAMoEConfig\.chunk_size = 64"):
            ExperimentConfig(data=DataConfig(seq_len=32))
        with pytest.raises(ConfigError, match=r"^DataConfig\.document_align = 32: must be a multiple"):
            ExperimentConfig(data=DataConfig(document_align=32))

    def test_a_stack_without_aamoe_has_no_chunks_to_fit(self):
        dense = ModelConfig(pattern=("parallel",))
        assert ExperimentConfig(model=dense, data=DataConfig(seq_len=32, document_align=1)).model == dense


def test_every_implementation_of_the_attention_can_be_named():
    assert set(get_args(Kernel)) == {*IMPLEMENTATIONS, "pallas_tpu"}


class TestDerived:
    def test_widths(self):
        model = ModelConfig(d_model=96, num_heads=3)
        assert (model.head_dim, model.ff_width) == (32, 384)
        assert dataclasses.replace(model, d_ff=10).ff_width == 10

    def test_one_beta_serves_every_layer(self):
        assert ModelConfig(num_layers=3).betas == (4.0, 4.0, 4.0)

    def test_configs_are_values(self):
        assert ExperimentConfig() == ExperimentConfig()
        assert hash(ExperimentConfig()) == hash(ExperimentConfig())
        with pytest.raises(dataclasses.FrozenInstanceError):
            ModelConfig().d_model = 3


class TestDict:
    def test_a_trip_through_json_loses_nothing(self):
        config = ExperimentConfig(
            model=ModelConfig(
                num_layers=2, pattern=("aamoe", "parallel"), aamoe=AAMoEConfig(budget=BudgetConfig(beta=(2.0, 3.0)))
            ),
            data=DataConfig(mixture=(("code", 1.0), ("books", 0.5))),
        )
        assert from_dict(ExperimentConfig, json.loads(json.dumps(to_dict(config)))) == config

    def test_fields_that_are_gone_are_passed_over(self):
        values = to_dict(BudgetConfig(beta=3.0)) | {"warmup_steps": 500, "warmup_scale": 4.0}
        assert from_dict(BudgetConfig, values) == BudgetConfig(beta=3.0)

    def test_fields_that_have_moved_are_found(self):
        """As a checkpoint has them that was written before they moved."""
        values = {
            "pattern": ["filtered_attention", "moe"],
            "num_layers": 2,
            "attention": {"window": 7, "filter": "none", "filter_threshold": 0.5, "filter_room": 0.75},
            "moe": {"num_experts": 5, "top_k": 1},
            "depth_capacity": 0.125,
            "fixed_tokens": None,
        }
        model = from_dict(ModelConfig, values)
        assert model.of(SparseAttentionConfig).window == 7
        assert model.of(FilteredAttentionConfig) == FilteredAttentionConfig("none", capacity=0.75)
        assert model.of(MoEConfig) == MoEConfig(num_experts=5, top_k=1)
        assert from_dict(ModelConfig, json.loads(json.dumps(to_dict(model)))) == model

    def test_fields_that_are_missing_take_their_defaults(self):
        assert from_dict(ExperimentConfig, {"training": {"steps": 3}}) == ExperimentConfig(
            training=TrainingConfig(steps=3)
        )

    def test_an_unknown_field_is_refused(self):
        with pytest.raises(ConfigError, match="ModelConfig has no field d_modle"):
            from_dict(ExperimentConfig, {"model": {"d_modle": 3}})

    def test_a_value_that_cannot_work_is_refused(self):
        with pytest.raises(ConfigError, match=r"ModelConfig\.norm = 'batch'"):
            from_dict(ModelConfig, {"norm": "batch"})


@pytest.mark.parametrize(
    ("field", "address", "wanted"),
    [
        ("data_dir", "s3://bucket/a", "a path or gs://BUCKET/FOLDER; mount other storage"),
        ("data_dir", "gs:/bucket/a", "a path or gs://BUCKET/FOLDER; mount other storage"),
        ("tokenizer", "s3://bucket/a", "a path; mount other storage"),
        ("tokenizer", "gs://bucket/a", "a path; mount other storage"),
    ],
)
def test_the_address_of_something_else_is_no_path(field, address, wanted):
    with pytest.raises(ConfigError, match=rf"DataConfig\.{field} = '{address}': must be {wanted}"):
        DataConfig(**{field: address})


def test_data_may_lie_in_a_bucket():
    assert DataConfig(data_dir="gs://bucket/data").data_dir == "gs://bucket/data"


@pytest.mark.parametrize("path", ["s3://bucket/run", Path("gs://bucket/run")])
def test_checkpoints_elsewhere_are_refused(path):
    with pytest.raises(ConfigError, match="must be a path or gs://BUCKET/FOLDER; mount other storage"):
        load_checkpoint(path)
