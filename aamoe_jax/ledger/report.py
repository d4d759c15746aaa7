"""The ledger as Markdown tables."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import get_args

from aamoe_jax.aamoe.costs import attended
from aamoe_jax.config import ModelConfig
from aamoe_jax.ledger.compiled import compiled
from aamoe_jax.ledger.published import PRECOMPUTED_SLIP, PRINTED, SLIPS, Quantity, Symbols, evaluate, formula
from aamoe_jax.markdown import table
from aamoe_jax.mixers.build import costs
from aamoe_jax.mixers.costs import Setting
from aamoe_jax.registry import MIXERS

EXACT_NOTE = (
    "What this code does for one mixer in one layer, in closed form: matrix products, what a mask hides included; "
    "norms, softmaxes, rotary turns and sorting are left out. Activations: what the forward pass leaves for the "
    "backward pass, without recomputation. AA-MoE spends its whole budget, every token finds room at its experts, "
    "`relu_moe` has as many as it aims at; tiles and blocks are full. Of an imported mixer that does not "
    "say what it costs, every parameter is multiplied once per token, and `-` is unknown."
)
COMPILED_NOTE = (
    "Closed form over what the compiler says. FLOPs are its `cost_analysis` in float32, elementwise operations "
    "included, and what loops do beyond the one turn that it counts, in closed form; activations are the output of a "
    "compiled forward pass that returns the arrays of its `jax.vjp` closure, less parameters and the output itself; "
    "cache bytes are those of the arrays."
)
PAPER_NOTE = (
    "As printed: nothing but products, W^O left out, bytes of half precision, t = 1. Corrected: where there is a slip. "
    "B rows, L tokens, d width, h heads, t devices along heads, m keys per resource, E experts, P pairs in a row. "
    "`exact` counts W^O, and sums in float32; `approximate` is in its parallel form but for decoding; of a fixed "
    "sequence the map is cached, not the keys. Activations are far more than printed: automatic differentiation keeps "
    "float32 maps and norms."
)


def exact_table(config: ModelConfig, rows: int, length: int) -> str:
    """All mixers in `exact` mode."""
    lines = []
    for name in sorted(MIXERS):
        found = costs(name, Setting(config, rows, length))
        kept = "-" if math.isnan(found.activation_bytes) else f"{found.activation_bytes / 2**20:.1f}"
        flops = [f"{found.prefill_flops / 1e9:.3f}", f"{found.decode_flops / 1e6:.3f}"]
        lines.append([name, *flops, kept, f"{found.cache_bytes}"])
    return table(["mixer", "prefill GFLOP", "decode MFLOP", "activations MiB", "cache bytes"], lines)


def compiled_table(config: ModelConfig, rows: int, length: int) -> str:
    """All mixers: `exact` over `compiled`."""
    lines = []
    for name in sorted(MIXERS):
        exact, said = costs(name, Setting(config, rows, length)), compiled(name, config, rows, length)
        pairs = [(getattr(exact, quantity), getattr(said, quantity)) for quantity in get_args(Quantity)]
        lines.append([name, *(f"{mine / theirs:.3f}" if theirs else f"{mine:g} = 0" for mine, theirs in pairs)])
    return table(["mixer", "prefill FLOPs", "decode FLOPs", "activation bytes", "cache bytes"], lines)


def paper_table(config: ModelConfig, rows: int, length: int) -> str:
    """What was published, put right where it slips, beside `exact`."""
    lines = [line for name in PRINTED for line in _paper_lines(name, config, rows, length)]
    return table(["mixer", "quantity", "printed", "value", "corrected", "value", "exact / corrected"], lines)


def symbols_of(config: ModelConfig, rows: int, length: int) -> Symbols:
    """What the letters stand for; AA-MoE spends its whole budget."""
    layer, given = config.aamoe, attended(Setting(config, rows, length))
    pairs = length * (given.pairs + (given.window_keys > 0))
    return Symbols(rows, length, config.d_model, config.num_heads, m=layer.chunk_size, E=layer.num_experts, P=pairs)


def _paper_lines(name: str, config: ModelConfig, rows: int, length: int) -> Iterable[list[str]]:
    symbols, exact = symbols_of(config, rows, length), costs(name, Setting(config, rows, length))
    for quantity in get_args(Quantity):
        printed, right = formula(name, quantity), formula(name, quantity, "corrected")
        if printed is None or right is None:
            continue
        value = evaluate(right, symbols)
        yield [
            name,
            quantity,
            printed,
            f"{evaluate(printed, symbols):.4g}",
            *(("", "") if right == printed else (right, f"{value:.4g}")),
            f"{getattr(exact, quantity) / value:.3f}" if value else f"{getattr(exact, quantity):g} = 0",
        ]


def slips() -> str:
    """Every slip, as a list."""
    named: dict[str, list[str]] = {}
    for name, slip in SLIPS.items():
        named.setdefault(slip.why, []).append(name)
    lines = [f"* {', '.join(names)}: {why}." for why, names in named.items()]
    return "\n".join([*lines, f"* random_qk, fixed_qk, once more: {PRECOMPUTED_SLIP.why}."])


def report(config: ModelConfig, rows: int, length: int, against: str) -> str:
    """The whole ledger.

    Args:
      against: `compiler` sets `exact` beside what the compiler says; `paper` leaves that out.
    """
    layer = config.aamoe
    setting = (
        f"B = {rows} rows of L = {length} tokens, d = {config.d_model}, H = {config.num_heads}, {config.dtype}; "
        "decoding: one more token in every row, caches with room for L. "
        f"AA-MoE: m = {layer.chunk_size}, E = {layer.num_experts}, beta = {config.betas[0]:g}."
    )
    sections = ["# The ledger", setting, "## Exact", EXACT_NOTE, exact_table(config, rows, length)]
    if against == "compiler":
        sections += ["## Exact over compiled", COMPILED_NOTE, compiled_table(config, rows, length)]
    sections += ["## As published", PAPER_NOTE, paper_table(config, rows, length), "Slips:", slips()]
    return "\n\n".join(sections) + "\n"
