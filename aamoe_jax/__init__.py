"""AA-MoE: every token spends one budget on chunks of context and on experts, in one attention call."""

from aamoe_jax.aamoe.allocation import Allocation
from aamoe_jax.aamoe.layer import AAMoELayer
from aamoe_jax.config import (
    AAMoEConfig,
    AttentionConfig,
    BudgetConfig,
    ConfigError,
    DataConfig,
    ExperimentConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    TrainingConfig,
)
from aamoe_jax.generation.decoder import Decoder
from aamoe_jax.generation.generate import generate, stream
from aamoe_jax.generation.sampling import Sampling
from aamoe_jax.mixers.base import Context
from aamoe_jax.mixers.statistics import summarize
from aamoe_jax.model import LanguageModel, merge, split, structure

__all__ = [
    "AAMoEConfig",
    "AAMoELayer",
    "Allocation",
    "AttentionConfig",
    "BudgetConfig",
    "ConfigError",
    "Context",
    "DataConfig",
    "Decoder",
    "ExperimentConfig",
    "LanguageModel",
    "MoEConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Sampling",
    "TrainingConfig",
    "generate",
    "merge",
    "split",
    "stream",
    "structure",
    "summarize",
]
