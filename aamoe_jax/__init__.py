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
    MeshConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    TrainingConfig,
)
from aamoe_jax.evaluation.evaluate import evaluate
from aamoe_jax.evaluation.perplexity import Evaluation
from aamoe_jax.generation.decoder import Decoder
from aamoe_jax.generation.generate import generate
from aamoe_jax.generation.sampling import Sampling
from aamoe_jax.generation.stream import stream
from aamoe_jax.mixers.base import Context
from aamoe_jax.mixers.statistics import summarize
from aamoe_jax.model import LanguageModel, merge, split, structure
from aamoe_jax.training.checkpoints import Checkpoint, load_checkpoint
from aamoe_jax.training.loop import train

__version__ = "0.1.0"

__all__ = [
    "AAMoEConfig",
    "AAMoELayer",
    "Allocation",
    "AttentionConfig",
    "BudgetConfig",
    "Checkpoint",
    "ConfigError",
    "Context",
    "DataConfig",
    "Decoder",
    "Evaluation",
    "ExperimentConfig",
    "LanguageModel",
    "MeshConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Sampling",
    "TrainingConfig",
    "__version__",
    "evaluate",
    "generate",
    "load_checkpoint",
    "merge",
    "split",
    "stream",
    "structure",
    "summarize",
    "train",
]
