"""What the model must do in a step, and its kernels: in closed form, from the config alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from aamoe_jax.aamoe.budget import UNBOUNDED, most_pairs
from aamoe_jax.aamoe.costs import flops_per_pair
from aamoe_jax.aamoe.parallel import pair_bound
from aamoe_jax.config import ExperimentConfig, ModelConfig
from aamoe_jax.cost import forward_flops
from aamoe_jax.mixers.splash import TILES
from aamoe_jax.preflight.hardware import Slice
from aamoe_jax.preflight.summary import Mode
from aamoe_jax.preflight.work import Kernel
from aamoe_jax.shards import WHOLE, Shards
from pallas_kernels import chips
from pallas_kernels.block_sparse_attention.tpu import dispatch
from pallas_kernels.block_sparse_attention.types import Problem

FORWARD, BACKWARD = 2, 5
"""Matrix products per pair in the passes of a kernel: scores and values; scores again, and four gradients."""
SPLASH = {"splash_mha_fwd": 2, "splash_mha_dkv": 4, "splash_mha_dq": 3}
"""Matrix products of dense attention by JAX's kernels, which attach none."""
CHOICE_RATE = {"v5e": 0.79, "v5p": 0.75, "v6e": 0.26, "tpu7x": 0.28}
"""Share of the matrix units' peak that the kernels of the pooled router reach by their schedules, in heads of 128
(`tests/pallas_kernels/test_aot_choice.py`)."""
SPLASH_RATE = {"v5e": (0.74, 0.97), "v5p": (0.69, 0.45), "v6e": (0.22, 0.39), "tpu7x": (0.23, 0.36)}
"""The same of dense attention by JAX's kernels, in the forward and the backward pass; the grid of the backward pass has
no parallel dimension, so that one core of a v5p does it (`experiments/results/tpu_schedule.md`)."""
OVER_SCHEDULE = 1.35
"""What a chip takes over what its schedule says: an assumption, from one kernel. Splash attention's forward pass was
measured at 257 TFLOP/s on a tpu7x core (8192 tokens, d = 128) by its authors; schedules of it say 1.35 to 1.4 times."""
PATHS = {"block_sparse_attention": "resident", "gathered": "gathered", "dense_attention": "dense"}
"""How the kernels of a path are called, and the path."""


@dataclasses.dataclass(frozen=True)
class KernelWork:
    """Of one device in one step."""

    flops: float
    seconds: float
    """Modelled: those of the committed schedules, times OVER_SCHEDULE."""


def step_flops(config: ExperimentConfig, tokens: int, mode: Mode) -> float:
    """FLOPs of the model over so many tokens, all budgets spent; the backward pass costs twice the forward."""
    length = config.data.seq_len
    return (3 if mode == "train" else 1) * spent_flops(config.model, tokens // length, length)


def spent_flops(config: ModelConfig, rows: int, length: int) -> float:
    """FLOPs of a forward pass, readout included, all budgets spent."""
    return forward_flops(config, rows, length, {"pairs_expert": np.asarray(rows * length * pairs_per_token(config))})


def pairs_per_token(config: ModelConfig) -> float:
    """Resources that a token can pay for, in all AA-MoE layers together."""
    return sum(bought(config), 0.0)


def bought(config: ModelConfig) -> list[float]:
    """Resources that a token can pay for, its local window among them, in each AA-MoE layer."""
    most = config.aamoe.max_resources
    betas = [config.betas[layer] for layer in config.layers_of("aamoe")]
    return [beta if most is None else min(beta, most) for beta in betas]


def kernel_work(
    config: ExperimentConfig, piece: Slice, shards: Shards, tokens: float, mode: Mode, kernels: Sequence[Kernel]
) -> KernelWork:
    """What the attention kernels of a program do for so many tokens, as often as the program runs them.

    Args:
      shards: of the mesh. All cores of a device run its kernels, as far as there is work for them.
      tokens: those of a step, over the number of devices.
    """
    choice = sum(kernel.flops for kernel in kernels if kernel.name.startswith("choice_"))
    parts = [
        _routed(config, piece, shards, tokens, mode, kernels),
        _dense(config, piece, tokens, kernels),
        KernelWork(choice, choice / (CHOICE_RATE[piece.chip] * piece.device.flops)),
    ]
    return KernelWork(sum(part.flops for part in parts), OVER_SCHEDULE * sum(part.seconds for part in parts))


def _dense(config: ExperimentConfig, piece: Slice, tokens: float, kernels: Sequence[Kernel]) -> KernelWork:
    """Of dense attention in rows of one document, the blocks of the diagonal whole. Windows count as whole rows."""
    length, (forward, backward) = config.data.seq_len, SPLASH_RATE[piece.chip]
    product = tokens * 2 * config.model.d_model * (length + min(TILES[0], length)) / 2
    flops = seconds = 0.0
    for kernel in kernels:
        for name, products in SPLASH.items():
            if kernel.name.startswith(name):
                flops += kernel.times * products * product
                rate = forward if name == "splash_mha_fwd" else backward
                seconds += kernel.times * products * product / (rate * piece.device.flops)
    return KernelWork(flops, seconds)


def _routed(
    config: ExperimentConfig, piece: Slice, shards: Shards, tokens: float, mode: Mode, kernels: Sequence[Kernel]
) -> KernelWork:
    """Pairs of AA-MoE layers, in tiles as full as pairs that are spread evenly make them."""
    model = config.model
    path = next((path for name, path in PATHS.items() for kernel in kernels if kernel.name.startswith(name)), None)
    if path is None:
        return KernelWork(0.0, 0.0)
    products = BACKWARD + FORWARD * _forward_passes(kernels) if mode == "train" else FORWARD
    flops = tokens * pairs_per_token(model) * products * flops_per_pair(model) / FORWARD
    # One call has the tokens of whole rows, with some of the heads and of the resources.
    calls = config.training.accumulate if mode == "train" else 1
    attending = tokens * shards.tensor * shards.resource
    problem = routed_problem(model, config.data.seq_len, max(1, round(attending / calls / config.data.seq_len)), shards)
    seconds = 0.0
    with chips.assume(piece.chip):
        plan = dispatch.PLANS[path](problem)
        for pairs in bought(model):
            given = problem.tokens * pairs / shards.resource
            a_call = 1e-9 * dispatch.nanoseconds(problem, piece.chip, path, plan, "issue", pairs=given)
            seconds += a_call * attending / problem.tokens * products / (FORWARD + BACKWARD)
    return KernelWork(flops, seconds)


def routed_problem(config: ModelConfig, length: int, rows: int, shards: Shards = WHOLE) -> Problem:
    """A call of the kernels on one device: rows of whole chunks, one after the other."""
    layer, m, chunks = config.aamoe, config.aamoe.chunk_size, length // config.aamoe.chunk_size
    slots = min(layer.max_resources or UNBOUNDED, chunks + layer.num_experts)
    beta = max(config.betas[index] for index in config.layers_of("aamoe"))
    most = pair_bound(most_pairs(layer.budget.normalizer, rows, length, slots, beta, layer), shards)
    of_row, experts = max(1, chunks // shards.resource), layer.num_experts // shards.resource
    shape = rows * length, config.num_heads // shards.tensor, config.head_dim, rows * of_row + experts, m, slots
    return Problem(*shape, jnp.dtype(config.dtype), rows * of_row, most, config.head_dim**-0.5, row_chunks=of_row)


def _forward_passes(kernels: Sequence[Kernel]) -> float:
    """How often the forward pass runs for every backward pass: once more where it is recomputed."""
    attention = [kernel for kernel in kernels if kernel.name.startswith(tuple(PATHS))]
    forward, backward = (
        sum(kernel.times for kernel in attention if part in kernel.name) for part in ("forward", "backward")
    )
    return forward / backward if backward else 1.0
