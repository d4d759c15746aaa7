"""The only schema: one frozen dataclass for each part of an experiment.

Every field is documented where it stands; `__post_init__` refuses what cannot work and names field, value and what is
wanted. The library reads these objects and nothing else: no flags, no gin, no environment.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import reprlib
import typing
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, Literal, NoReturn, TypeVar, get_args

from aamoe_jax import patterns
from aamoe_jax.registry import MIXERS, own_configs, unknown_mixer

BudgetNormalizer = Literal["row", "prefix"]
Importance = Literal["learned", "bounded", "uniform"]
Local = Literal["window", "chunk", "routed", "none"]
Router = Literal["learned", "learned_nope", "pooled"]
RouterPrecision = Literal["highest", "high", "default"]
Remat = Literal["none", "dots", "attention", "full"]
Kernel = Literal[
    "reference", "xla", "pallas_tpu", "pallas_tpu_resident", "pallas_tpu_gathered", "pallas_tpu_dense", "pallas_gpu"
]

MOST_LAYERS = 10_000
"""Figures of every layer are written down one by one."""

Own = TypeVar("Own")

RENAMED: Mapping[str, str] = {
    "AttentionConfig.window": "SparseAttentionConfig.window",
    "AttentionConfig.stride": "SparseAttentionConfig.stride",
    "AttentionConfig.sinks": "SparseAttentionConfig.sinks",
    "AttentionConfig.filter": "FilteredAttentionConfig.filter",
    "AttentionConfig.filter_threshold": "FilteredAttentionConfig.threshold",
    "AttentionConfig.filter_room": "FilteredAttentionConfig.capacity",
    "AttentionConfig.clusters": "ClusteredAttentionConfig.clusters",
    "AttentionConfig.clusters_kept": "ClusteredAttentionConfig.clusters_kept",
    "ModelConfig.depth_capacity": "MixtureOfDepthsConfig.capacity",
    "ModelConfig.fixed_tokens": "FixedQKConfig.tokens",
}
"""Fields that moved to the configs of the mixers that read them, by the names they had. Gin files may use those for one
release, checkpoints always."""
TRACKERS = ("tensorboard", "wandb", "mlflow")
REMOVED = {"BudgetConfig": {"warmup_steps", "warmup_scale"}, "TrainingConfig": {"tensorboard"}}
"""Fields of training that are gone, by class. Checkpoints that name them load, for their models are the same."""


class ConfigError(ValueError):
    """A configuration that cannot work. The message names the field, its value and what is wanted."""


def refuse(owner: Any, field: str, wanted: str) -> NoReturn:
    """Complains about a field of a config.

    Raises:
      ConfigError: always.
    """
    raise ConfigError(f"{type(owner).__name__}.{field} = {shown(getattr(owner, field))}: {wanted}")


_SHORT = reprlib.Repr()
_SHORT.maxtuple = _SHORT.maxlist = 16
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 120


def shown(value: Any) -> str:
    """`repr(value)` as a message can hold it: long texts, numbers and tuples are cut, and deep ones."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        return "a number of thousands of digits"


def first_line(error: object) -> str:
    """What a message can quote of an error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def require_positive(owner: Any, *fields: str) -> None:
    """Refuses fields that are not above 0 and finite."""
    for field in fields:
        value = getattr(owner, field)
        if not 0 < value < math.inf:
            refuse(owner, field, "must be a positive number")


def local_path(name: str, path: str | PurePath, wanted: str = "a path") -> Path:
    """A folder or file of this machine. Refuses addresses such as `gs://`."""
    if re.match("[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):
        raise ConfigError(f"{name} = {str(path)!r}: must be {wanted}; mount other storage and give its path here")
    return Path(path)


def in_bucket(name: str, path: str | PurePath) -> bool:
    """Whether a path is the address of a bucket; else it is of this machine. Refuses other addresses."""
    if re.fullmatch(r"gs://[a-z0-9][a-z0-9._-]+[a-z0-9](/[^*?[]*)?", str(path)):
        return True
    local_path(name, path, "a path or gs://BUCKET/FOLDER")
    return False


def require_choice(owner: Any, field: str, choices: tuple[str, ...]) -> None:
    """Refuses a field that is none of the choices."""
    if getattr(owner, field) not in choices:
        refuse(owner, field, f"must be one of {', '.join(map(repr, choices))}")


@dataclasses.dataclass(frozen=True)
class BudgetConfig:
    """How a token's share of the budget is computed (eq 8; decisions 11, 16, 21-23)."""

    beta: float | tuple[float, ...] = 4.0
    """Mean number of resources per token: B = beta * L (AA-12). A tuple gives one value per layer (AA-30)."""
    normalizer: BudgetNormalizer = "prefix"
    """`row`: the paper's softmax over the whole document, which sees the future. `prefix`: so far (causal)."""
    importance: Importance = "learned"
    """What makes budgets differ. `learned`: w_B . h; `bounded`: the same, within a quarter and 4 times the mean;
    `uniform`: nothing, every token has beta."""
    expert_share: float | None = None
    """None: chunks and experts compete for one budget. A number: this share of every token's budget buys experts alone,
    and the rest context alone, whatever their scores."""
    expert_price: float = 1.0
    """Price of an expert, where a chunk of context costs 1 (AA-39); at least 1, so that a budget bounds the pairs."""
    distance_price: float = 0.0
    """What distance adds to the price of a chunk: one that is n chunks back costs 1 + distance_price * log2(n)."""
    load_price: float = 0.0
    """What load adds to the price of an expert: expert_price + load_price * E * load, where load is the expert's mean
    share of the router's softmax over the tokens before in the document; 1 / E where experts are wanted alike."""
    slack: int = 64
    """Pairs by which the running spend of a document's causal budgets may exceed beta * i (the cap, decision 23)."""

    def __post_init__(self) -> None:
        betas = self.beta if isinstance(self.beta, tuple) else (self.beta,)
        if not betas or not all(0 < beta < math.inf for beta in betas):
            refuse(self, "beta", "must be a positive number, or one per layer")
        require_choice(self, "normalizer", get_args(BudgetNormalizer))
        require_choice(self, "importance", get_args(Importance))
        if self.expert_share is not None and not 0 <= self.expert_share <= 1:
            refuse(self, "expert_share", "must be in [0, 1], or None for one budget")
        if not 1 <= self.expert_price < math.inf:
            refuse(self, "expert_price", "must be a number of at least 1")
        for field in ("distance_price", "load_price"):
            if not 0 <= getattr(self, field) < math.inf:
                refuse(self, field, "must be a number of at least 0")
        for field, plain in (("expert_price", 1), ("distance_price", 0), ("load_price", 0)):
            if self.expert_share is not None and getattr(self, field) != plain:
                refuse(self, field, f"must be {plain} where experts have a share of their own (expert_share)")
        if self.slack < 0:
            refuse(self, "slack", "must be at least 0")


@dataclasses.dataclass(frozen=True)
class AAMoEConfig:
    """The AA-MoE layer: resources, router, allocation (section 2.2; decisions 03-17)."""

    chunk_size: int = 64
    """m: tokens per context chunk and key/value rows per expert."""
    num_experts: int = 64
    """E: 0 leaves context alone."""
    context: Literal["routed", "none"] = "routed"
    """`none`: no chunk of context can be chosen; experts (and the local resource) are all there is."""
    local: Local = "window"
    """What a token sees of its own neighbourhood: the last m tokens (`window`) or its own chunk up to itself (`chunk`)
    as its first resource; its own chunk like any other (`routed`); or nothing (`none`, the paper's example)."""
    router: Router = "learned"
    """What resources are scored by. `learned`: eq 4, by W_c and the last token of a chunk, with rotary positions, and
    by expert embeddings; `learned_nope`: the same without positions. `pooled`: by the share of attention that pooled
    keys estimate, with nothing of its own to train."""
    pooled_keys: int = 4
    """Of `pooled`, g: so many keys stand for the chunk_size keys of a chunk or expert, each the mean of a group."""
    router_precision: RouterPrecision = "high"
    """Of the products that make the scores, by the names of `jax.lax.Precision`: six products in bfloat16 on a TPU for
    one in float32 (`highest`), three (`high`), or one (`default`). CPUs multiply in float32 whatever this says."""
    expert_router: Literal["embedding", "attention"] = "embedding"
    """Of a learned router, the scores of experts: h . e_l, or attention among the experts of one token (UNI-09)."""
    router_input: Literal["token", "causal_conv"] = "token"
    """What a learned router sees: the token, or a short causal convolution over it and the tokens before (UNI-10)."""
    bias: Literal["log_prob", "none"] = "log_prob"
    """`log_prob`: log P(i, j) is added to the scores (eq 15-16). `none` cuts the gradient to router and budget."""
    signal: Literal["joint", "context_stopped", "experts_stopped", "separate"] = "joint"
    """What the router learns from (AA-23): one softmax over chunks and experts (`joint`); the same without gradient to
    the scores of one of the two; or a softmax over each of the two for itself (`separate`)."""
    expert_gate: bool = False
    """Whether a gate weighs the experts of a token beside attention: (h . g_l) / sqrt(d) is added to log P of expert l
    once the budget is spent (the ablation of AA-24). It starts at 0."""
    key_convolution: bool = False
    """Whether keys are of a token and a little of the three before it, channel by channel: with this, a key says what
    came before as well, and a mean of keys more of its group."""
    query_convolution: bool = False
    """Whether queries are of the same convolution: with this, a token looks for what followed the few tokens before it,
    not for what followed tokens like itself."""
    null_slot: Literal["none", "learned"] = "none"
    """`learned`: one zero-valued key with a learned logit per head: one resource alone still carries gradient."""
    max_resources: int | None = None
    """K_max: most resources one token can be given. None: all there are."""
    budget: BudgetConfig = dataclasses.field(default_factory=BudgetConfig)

    def __post_init__(self) -> None:
        require_positive(self, "chunk_size")
        if self.num_experts < 0:
            refuse(self, "num_experts", "must be at least 0")
        require_choice(self, "context", ("routed", "none"))
        for field, kind in (("local", Local), ("router", Router), ("router_precision", RouterPrecision)):
            require_choice(self, field, get_args(kind))
        if self.router == "pooled":
            if self.pooled_keys < 1 or self.chunk_size % self.pooled_keys:
                refuse(self, "pooled_keys", f"must divide chunk_size = {self.chunk_size}")
            if self.local == "routed":
                refuse(self, "local", "the own chunk has no pooled keys before it ends; take router = 'learned'")
        if self.query_convolution and not self.key_convolution:
            refuse(self, "query_convolution", "is of the convolution that key_convolution = True makes")
        require_choice(self, "expert_router", ("embedding", "attention"))
        require_choice(self, "router_input", ("token", "causal_conv"))
        for field, plain in (("expert_router", "embedding"), ("router_input", "token")):
            if self.router == "pooled" and getattr(self, field) != plain:
                refuse(self, field, "router = 'pooled' has nothing of its own to train; take router = 'learned'")
        require_choice(self, "bias", ("log_prob", "none"))
        if self.expert_gate and (self.bias == "none" or not self.num_experts):
            refuse(self, "expert_gate", "is added to the bias of experts: it needs bias = 'log_prob' and num_experts")
        if self.budget.load_price and not self.num_experts:
            refuse(self.budget, "load_price", "there are no experts (AAMoEConfig.num_experts = 0)")
        require_choice(self, "signal", ("joint", "context_stopped", "experts_stopped", "separate"))
        require_choice(self, "null_slot", ("none", "learned"))
        if self.max_resources is not None and self.max_resources < 1:
            refuse(self, "max_resources", "must be at least 1, or None for all")
        if self.budget.expert_share is not None and (self.context == "none" or self.num_experts == 0):
            raise ConfigError(
                f"BudgetConfig.expert_share = {self.budget.expert_share}: there is only one kind of resource "
                "(AAMoEConfig.context, AAMoEConfig.num_experts); take None"
            )
        if self.context == "none" and self.num_experts == 0 and self.local in ("none", "routed"):
            refuse(self, "num_experts", "a layer without context and local resources needs at least one expert")
        if self.context == "none" and self.local == "routed":
            refuse(self, "local", "the own chunk cannot be routed when context is 'none'")

    @property
    def looks_back(self) -> bool:
        """Whether keys, or the router, see the tokens just before one."""
        return self.key_convolution or self.router_input == "causal_conv"

    @property
    def pool_size(self) -> int:
        """Keys of a group whose mean is one pooled key."""
        return self.chunk_size // self.pooled_keys


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Embedding, a stack of mixers, norm, logits."""

    vocab_size: int = 384
    d_model: int = 256
    num_heads: int = 4
    num_layers: int = 4
    num_kv_heads: int | None = None
    """Heads of keys and values, each shared by num_heads / num_kv_heads heads of queries. None: num_heads."""
    pattern: tuple[str, ...] = ("aamoe",)
    """The layers of one period of the stack, in the grammar of `patterns.py`: ('aamoe*3', 'attention+feed_forward'), or
    ('even(attention+feed_forward, aamoe)',). Held as the shortest period that it comes to."""
    d_ff: int | None = None
    """Hidden width of feed-forwards and of All-Attention's memory. None: 4 * d_model; of a SwiGLU, with its third
    matrix, 8/3 d_model."""
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    """What norms add to the mean square, but for those of queries and keys, which add 1e-6."""
    qk_norm: Literal["none", "rms"] = "rms"
    rope_base: float = 10_000.0
    embedding: Literal["tied", "untied"] = "untied"
    """`tied`: one table for both ends. It saves parameters, and starts by predicting every token to repeat."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and matrix products. Parameters are float32; so are scores, budgets and softmax
    statistics."""
    remat: Remat = "none"
    """Recomputed in backward: nothing; all but `attention`; all but attention and products (`dots`); all (`full`)."""
    kernel: Kernel | None = None
    """Implementation of the block-sparse attention; `pallas_tpu` is the fastest of the three that are named after it,
    by shape. None: the best for the device."""
    aamoe: AAMoEConfig = dataclasses.field(default_factory=AAMoEConfig)
    own: tuple[Any, ...] = ()
    """The configs of mixers that were registered with one, ordered by the name of their class: those of the pattern,
    and others that are not at their defaults. Of several of one class the last counts."""

    def __post_init__(self) -> None:
        require_positive(self, "vocab_size", "d_model", "num_heads", "num_layers", "norm_eps", "rope_base")
        if self.num_layers > MOST_LAYERS:
            refuse(self, "num_layers", f"must be at most {MOST_LAYERS}")
        if self.d_model % self.num_heads:
            refuse(self, "d_model", f"must be divisible by num_heads = {self.num_heads}")
        if self.head_dim % 2:
            refuse(self, "d_model", f"d_model / num_heads = {self.head_dim} must be even (rotary positions turn pairs)")
        self._expand_pattern()
        if self.kv_heads < 1 or self.num_heads % self.kv_heads:
            refuse(self, "num_kv_heads", f"must divide num_heads = {self.num_heads}, or be None for as many")
        if self.d_ff is not None and self.d_ff < 1:
            refuse(self, "d_ff", "must be at least 1, or None for 4 * d_model")
        require_choice(self, "norm", ("rms", "layer"))
        require_choice(self, "qk_norm", ("none", "rms"))
        require_choice(self, "embedding", ("tied", "untied"))
        require_choice(self, "dtype", ("float32", "bfloat16"))
        require_choice(self, "remat", get_args(Remat))
        if self.kernel is not None:
            require_choice(self, "kernel", get_args(Kernel))
        beta = self.aamoe.budget.beta
        if isinstance(beta, tuple) and len(beta) != self.num_layers:
            raise ConfigError(
                f"BudgetConfig.beta = {shown(beta)}: {len(beta)} values for num_layers = {self.num_layers}"
            )

    def _expand_pattern(self) -> None:
        try:
            pattern = patterns.expand(self.pattern, self.num_layers)
        except ValueError as error:
            refuse(self, "pattern", str(error))
        for layer in pattern:
            names = patterns.mixers_of(layer)
            for name in names:
                if name not in MIXERS:
                    refuse(self, "pattern", unknown_mixer(name))
                if names.count(name) > 1:
                    refuse(self, "pattern", f"layer {layer!r} has {name!r} twice")
        object.__setattr__(self, "pattern", pattern)
        given = {type(config): config for config in self.own}
        wanted = {cls for _, name in self.mixers if (cls := MIXERS[name].config) is not None}
        wanted |= {cls for cls, config in given.items() if config != cls()}
        own = [given.get(cls) or cls() for cls in sorted(wanted, key=lambda cls: cls.__name__)]
        object.__setattr__(self, "own", tuple(own))

    def of(self, cls: type[Own]) -> Own:
        """The config of this class, which a mixer was registered with."""
        return next((config for config in self.own if type(config) is cls), cls())

    @functools.cached_property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @functools.cached_property
    def periods(self) -> int:
        """How often the pattern is repeated."""
        return self.num_layers // len(self.pattern)

    @functools.cached_property
    def mixers(self) -> tuple[tuple[int, str], ...]:
        """The mixers of one period in order, each with the layer of the period that it is in."""
        return tuple((at, name) for at, layer in enumerate(self.pattern) for name in patterns.mixers_of(layer))

    def layers_of(self, name: str) -> tuple[int, ...]:
        """The layers of the stack that have a mixer of this name."""
        stack = self.pattern * self.periods
        return tuple(at for at, layer in enumerate(stack) if name in patterns.mixers_of(layer))

    @property
    def ff_width(self) -> int:
        return self.d_ff if self.d_ff is not None else 4 * self.d_model

    @property
    def swiglu_width(self) -> int:
        """Hidden units of a SwiGLU: d_ff, or else 8/3 d_model, whose three matrices have the parameters of a
        feed-forward's two; rounded up to a multiple of num_heads, so that a mesh divides both alike."""
        return self.d_ff if self.d_ff is not None else -(-8 * self.d_model // (3 * self.num_heads)) * self.num_heads

    @functools.cached_property
    def betas(self) -> tuple[float, ...]:
        """Budget per token of each layer."""
        beta = self.aamoe.budget.beta
        return beta if isinstance(beta, tuple) else (beta,) * self.num_layers


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which text, cut how."""

    mixture: tuple[tuple[str, float], ...] = (("code", 1.0),)
    """(dataset, weight) pairs. `code`, `books`, `papers`: prepared by launch.prepare; `tfds:NAME`: the TFDS
    catalogue."""
    data_dir: str = "data"
    """Where prepared datasets lie."""
    tokenizer: str = "bytes"
    """`bytes` (ByT5 ids), or the path of a sentencepiece .model, a byte-level tokenizer.json or a .tiktoken file."""
    seq_len: int = 1024
    """L: tokens per row."""
    document_align: int = 64
    """Documents start at multiples of this many tokens (decision 30): a multiple of the model's chunk size."""

    def __post_init__(self) -> None:
        require_positive(self, "seq_len", "document_align")
        in_bucket("DataConfig.data_dir", self.data_dir)
        local_path("DataConfig.tokenizer", self.tokenizer)
        if not self.mixture:
            refuse(self, "mixture", "must name at least one dataset, such as (('code', 1.0),)")
        for entry in self.mixture:
            if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str) and entry[1] > 0):
                refuse(self, "mixture", "every entry is (name, weight) with a positive weight")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with clipping, warm-up and a schedule."""

    learning_rate: float = 3e-3
    schedule: Literal["cosine", "wsd"] = "cosine"
    """`cosine` decay after warm-up; `wsd`: warm-up, stable, then linear decay over the last `decay_fraction` of
    steps."""
    warmup_steps: int = 50
    decay_fraction: float = 0.2
    final_fraction: float = 0.1
    """Learning rate at the last step, as a fraction of the peak."""
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    """Not applied to norms, expert rows and router embeddings (decision 29)."""
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        require_positive(self, "learning_rate", "clip_norm")
        require_choice(self, "schedule", ("cosine", "wsd"))
        if self.warmup_steps < 0:
            refuse(self, "warmup_steps", "must be at least 0")
        for field in ("beta1", "beta2"):
            if not 0 <= getattr(self, field) < 1:
                refuse(self, field, "must be in [0, 1)")
        for field in ("decay_fraction", "final_fraction"):
            if not 0 <= getattr(self, field) <= 1:
                refuse(self, field, "must be in [0, 1]")
        if self.weight_decay < 0:
            refuse(self, "weight_decay", "must be at least 0")


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """How long, how often."""

    steps: int = 1000
    batch_size: int = 8
    """Rows per step, over all devices."""
    accumulate: int = 1
    """Micro-batches per step; divides batch_size."""
    seed: int = 0
    log_every: int = 10
    eval_every: int = 200
    """Steps between evaluations on the validation split; 0: never."""
    eval_batches: int = 8
    checkpoint_every: int = 200
    keep_last: int = 2
    """Newest checkpoints kept, beside the one with the best validation loss."""
    init_from: str | None = None
    """A run folder or a checkpoint whose parameters the run begins with (a warm start), in place of random ones; of the
    same model and tokenizer. Everything else begins anew: optimizer, learning rate, data."""
    local_dir: str | None = None
    """A folder of each machine, on its disk or in its memory (/dev/shm), for checkpoints between those of the run
    folder; `{process}` in it stands for the number of the process. None: there are none."""
    local_every: int = 10
    """Steps between local checkpoints."""
    check_every: int = 0
    """Steps between two that are computed twice, to find damaged devices, and slow ones; 0: never."""
    trackers: tuple[str, ...] = ()
    """What shows metrics beside metrics.jsonl: 'tensorboard', 'wandb', 'mlflow'. Each needs its extra installed."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """A step whose loss or gradient is not finite ends the run (`stop`), or leaves the state as it was (`skip`)."""

    def __post_init__(self) -> None:
        fields = ("steps", "batch_size", "accumulate", "log_every", "eval_batches", "checkpoint_every", "keep_last")
        require_positive(self, *fields, "local_every")
        if self.batch_size % self.accumulate:
            refuse(self, "accumulate", f"must divide batch_size = {self.batch_size}")
        for name in ("eval_every", "check_every"):
            if vars(self)[name] < 0:
                refuse(self, name, "must be at least 0")
        if not set(self.trackers) <= set(TRACKERS):
            refuse(self, "trackers", f"must be of {', '.join(map(repr, TRACKERS))}")
        require_choice(self, "nonfinite", ("stop", "skip"))


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The devices as a mesh of four axes, which all exist, of size 1 where they are not used (`sharding.py`).

    One axis may be -1: all devices that the others leave over. TPUs of several slices are joined by the data center
    network (DCN): `data` goes over the slices first, so that only gradients cross it, each device's own part of them
    where `fsdp` divides the parameters.
    """

    data: int = 1
    """Rows of a batch; every device along it holds the same parameters."""
    fsdp: int = -1
    """Rows of a batch too, but parameters and optimizer state are divided along it, and gathered for use."""
    resource: int = 1
    """Tokens of a row, and what they attend to: chunks of context and experts together."""
    tensor: int = 1
    """Heads and hidden units."""
    pair_bound: float | None = None
    """Most (token, resource) pairs that one shard of `resource` computes, as a multiple of its even share; pairs past
    it are dropped, those of the last tokens of the device's rows first, and counted (`overflow`). Evaluation drops
    none. None: as many as there can be, so none is ever dropped."""
    slices: int | None = None
    """TPU slices. None: as many as the devices say. Devices that know nothing of slices, such as CPUs, are taken in
    order, host by host."""

    def __post_init__(self) -> None:
        if self.slices is not None and self.slices < 1:
            refuse(self, "slices", "must be at least 1, or None for as many as there are")
        sizes = (self.data, self.fsdp, self.resource, self.tensor)
        for field, size in zip(("data", "fsdp", "resource", "tensor"), sizes, strict=True):
            if size < 1 and size != -1:
                refuse(self, field, "must be at least 1, or -1 for all devices that the other axes leave over")
            if size == -1 and sizes.count(-1) > 1:
                refuse(self, field, "only one axis can take what the others leave over")
        if self.pair_bound is not None and self.pair_bound < 1:
            refuse(self, "pair_bound", "must be at least 1 (the even share), or None for no bound")


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
    """One run: all parts together, and what must fit between them."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)

    def __post_init__(self) -> None:
        if not self.model.layers_of("aamoe"):
            return
        chunk_size = self.model.aamoe.chunk_size
        if self.data.seq_len < chunk_size:
            refuse(self.data, "seq_len", f"a row must hold at least one chunk of AAMoEConfig.chunk_size = {chunk_size}")
        if self.data.document_align % chunk_size:
            refuse(
                self.data,
                "document_align",
                f"must be a multiple of AAMoEConfig.chunk_size = {chunk_size}: documents start at chunk boundaries",
            )


def to_dict(config: Any) -> dict[str, Any]:
    """A JSON-ready nested dict of a config. Configs that mixers were registered with are under their names."""
    values = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            values[field.name] = to_dict(value)
        elif field.name != "own":
            values[field.name] = value
        elif value:  # configs without them read as they did before there were any
            values[field.name] = {type(own).__name__: to_dict(own) for own in value}
    return values


def from_dict(cls: type, values: dict[str, Any]) -> Any:
    """The inverse of `to_dict`, also after a trip through JSON, which turns tuples into lists.

    Raises:
      ConfigError: for a field that `cls` does not have, or a value that it refuses.
    """
    hints = typing.get_type_hints(cls)
    values = {name: value for name, value in values.items() if name not in REMOVED.get(cls.__name__, ())}
    if cls is ModelConfig:
        values = _with_fields_of_mixers(values)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise ConfigError(f"{cls.__name__} has no field {', '.join(unknown)}")

    def revive(hint: Any, value: Any) -> Any:
        is_config = isinstance(hint, type) and dataclasses.is_dataclass(hint)
        return from_dict(hint, value) if is_config else _tuples(value)

    own = own_configs()
    arguments = {name: revive(hints[name], value) for name, value in values.items() if name != "own"}
    found = {name: fields for name, fields in values.get("own", {}).items() if name in own}
    if found:
        arguments["own"] = tuple(from_dict(own[name], fields) for name, fields in found.items())
    return cls(**arguments)


def _with_fields_of_mixers(values: dict[str, Any]) -> dict[str, Any]:
    """A model's dict with the fields that have moved (RENAMED) where they are now."""
    values = dict(values)
    fields = {f"AttentionConfig.{name}": value for name, value in values.pop("attention", {}).items()}
    fields |= {f"ModelConfig.{name}": values.pop(name) for name in ("depth_capacity", "fixed_tokens") if name in values}
    own = {"MoEConfig": values.pop("moe")} if "moe" in values else {}
    for name, value in fields.items():
        owner, _, field = RENAMED.get(name, name).partition(".")
        own.setdefault(owner, {})[field] = value
    return values | {"own": own | values.get("own", {})} if own else values


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value
