"""What the model must do in a step, and its kernels: in closed form, from the config alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from aamoe_jax.aamoe.costs import flops_per_pair
from aamoe_jax.config import ExperimentConfig, ModelConfig
from aamoe_jax.cost import forward_flops
from aamoe_jax.mixers.splash import TILES
from aamoe_jax.preflight.hardware import Slice
from aamoe_jax.preflight.summary import Mode
from aamoe_jax.preflight.work import Kernel
from pallas_kernels.block_sparse_attention.tpu.dispatch import COSTS, REFERENCE_WORK
from pallas_kernels.chips import TPUS

FILL = 0.8
"""Share of a tile's rows that are pairs: assumed. Budgets leave slots unused, groups of pairs end inside a tile."""
FORWARD, BACKWARD = 2, 5
"""Matrix products per pair in the passes of a kernel: scores and values; scores again, and four gradients."""
SPLASH = {"splash_mha_fwd": 2, "splash_mha_dkv": 4, "splash_mha_dq": 3}
"""Matrix products of dense attention by JAX's kernels, which attach none."""
CHOICE_RATE = {"v5e": 0.8, "v5p": 0.75, "v6e": 0.26, "tpu7x": 0.28}
"""Share of the matrix units' peak that the kernels of the pooled router reach by their schedules, in heads of 128
(`tests/pallas_kernels/test_aot_choice.py`)."""
PATHS = {"block_sparse_attention": "resident", "gathered": "gathered", "dense_attention": "dense"}
"""How the kernels of a path are called, and the path."""


@dataclasses.dataclass(frozen=True)
class KernelWork:
    """Of one device in one step."""

    flops: float
    seconds: float
    """Modelled from the committed schedules, and of dense attention from the chip's peak; a chip takes longer."""


def step_flops(config: ExperimentConfig, tokens: int, mode: Mode) -> float:
    """FLOPs of the model over so many tokens, all budgets spent; the backward pass costs twice the forward."""
    length = config.data.seq_len
    return (3 if mode == "train" else 1) * spent_flops(config.model, tokens // length, length)


def spent_flops(config: ModelConfig, rows: int, length: int) -> float:
    """FLOPs of a forward pass, readout included, all budgets spent."""
    return forward_flops(config, rows, length, {"pairs_expert": np.asarray(rows * length * pairs_per_token(config))})


def pairs_per_token(config: ModelConfig) -> float:
    """Resources that a token can pay for, in all AA-MoE layers together."""
    most = config.aamoe.max_resources
    betas = [config.betas[layer] for layer in config.layers_of("aamoe")]
    return sum((beta if most is None else min(beta, most) for beta in betas), 0.0)


def kernel_work(
    config: ExperimentConfig, piece: Slice, tensor: int, tokens: float, mode: Mode, kernels: Sequence[Kernel]
) -> KernelWork:
    """What the attention kernels of a program do for so many tokens, as often as the program runs them.

    Args:
      tensor: devices that heads are divided over. All cores of one run its kernels, as far as there are heads for them.
      tokens: all tokens of a step, over all devices.
    """
    routed, dense = _routed(config.model, piece, tensor, tokens, mode, kernels), splash_flops(config, tokens, kernels)
    choice = sum(kernel.flops for kernel in kernels if kernel.name.startswith("choice_"))
    seconds = routed.seconds + (dense + choice / CHOICE_RATE[piece.chip]) / piece.device.flops
    return KernelWork(routed.flops + dense + choice, seconds)


def splash_flops(config: ExperimentConfig, tokens: float, kernels: Sequence[Kernel]) -> float:
    """Of dense attention in rows of one document, the blocks of the diagonal whole. Windows count as whole rows."""
    length, width = config.data.seq_len, config.model.d_model
    products = sum(kernel.times * SPLASH[name] for kernel in kernels for name in SPLASH if kernel.name.startswith(name))
    return products * tokens * 2 * width * (length + min(TILES[0], length)) / 2


def _routed(
    config: ModelConfig, piece: Slice, tensor: int, tokens: float, mode: Mode, kernels: Sequence[Kernel]
) -> KernelWork:
    """Pairs of AA-MoE layers."""
    path = next((path for name, path in PATHS.items() for kernel in kernels if kernel.name.startswith(name)), None)
    if path is None:
        return KernelWork(0.0, 0.0)
    products = BACKWARD + FORWARD * _forward_passes(kernels) if mode == "train" else FORWARD
    flops = tokens * pairs_per_token(config) * products * flops_per_pair(config) / FORWARD
    # Schedules are of one forward and one backward pass, with keys of 128 rows and 1024 lanes.
    rate = 2 * (FORWARD + BACKWARD) * REFERENCE_WORK / (1e-9 * min(COSTS[piece.chip][path].values()))
    cores = TPUS[piece.chip].device_cores
    if path != "resident":
        cores = min(cores, max(1, config.num_heads // tensor))
    return KernelWork(flops, flops / (rate * FILL * cores))


def _forward_passes(kernels: Sequence[Kernel]) -> float:
    """How often the forward pass runs for every backward pass: once more where it is recomputed."""
    attention = [kernel for kernel in kernels if kernel.name.startswith(tuple(PATHS))]
    forward, backward = (
        sum(kernel.times for kernel in attention if part in kernel.name) for part in ("forward", "backward")
    )
    return forward / backward if backward else 1.0
