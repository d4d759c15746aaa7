"""AA-MoE: every token spends one budget on chunks of context and on experts, in one attention call."""

from aamoe_jax.aamoe.allocation import Allocation
from aamoe_jax.aamoe.layer import AAMoELayer
from aamoe_jax.check import check_mixer
from aamoe_jax.config import (
    AAMoEConfig,
    BudgetConfig,
    ConfigError,
    DataConfig,
    ExperimentConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from aamoe_jax.evaluation.evaluate import evaluate
from aamoe_jax.evaluation.perplexity import Evaluation
from aamoe_jax.extensions import import_mixers
from aamoe_jax.generation.decoder import Decoder
from aamoe_jax.generation.generate import generate
from aamoe_jax.generation.sampling import Sampling
from aamoe_jax.generation.stream import stream
from aamoe_jax.mixers.base import Context, Mixer, causal_mask
from aamoe_jax.mixers.clustered import ClusteredAttentionConfig
from aamoe_jax.mixers.costs import Costs, Setting
from aamoe_jax.mixers.depth import MixtureOfDepthsConfig
from aamoe_jax.mixers.experts import MoEConfig
from aamoe_jax.mixers.filtered import FilteredAttentionConfig
from aamoe_jax.mixers.fixed_maps import FixedQKConfig
from aamoe_jax.mixers.sparse_attention import SparseAttentionConfig
from aamoe_jax.mixers.statistics import summarize
from aamoe_jax.model import LanguageModel, merge, split, structure
from aamoe_jax.registry import register
from aamoe_jax.training.checkpoints import Checkpoint, load_checkpoint
from aamoe_jax.training.loop import train

__version__ = "0.1.0"

__all__ = [
    "AAMoEConfig",
    "AAMoELayer",
    "Allocation",
    "BudgetConfig",
    "Checkpoint",
    "ClusteredAttentionConfig",
    "ConfigError",
    "Context",
    "Costs",
    "DataConfig",
    "Decoder",
    "Evaluation",
    "ExperimentConfig",
    "FilteredAttentionConfig",
    "FixedQKConfig",
    "LanguageModel",
    "MeshConfig",
    "Mixer",
    "MixtureOfDepthsConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Sampling",
    "Setting",
    "SparseAttentionConfig",
    "TrainingConfig",
    "__version__",
    "causal_mask",
    "check_mixer",
    "evaluate",
    "generate",
    "import_mixers",
    "load_checkpoint",
    "merge",
    "register",
    "split",
    "stream",
    "structure",
    "summarize",
    "train",
]
