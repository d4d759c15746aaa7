"""The ledger: every mixer has a row, the compiler agrees, and the published formulas are those that were published.

Nothing here is run: mixers are compiled, at sizes where products dominate.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from aamoe_jax.config import AAMoEConfig, BudgetConfig, ModelConfig
from aamoe_jax.ledger.compiled import Trial, beyond_one_turn, compiled
from aamoe_jax.ledger.published import PRECOMPUTED_SLIP, PRINTED, SLIPS, Symbols, evaluate, formula
from aamoe_jax.ledger.report import report, symbols_of
from aamoe_jax.mixers.attention import SAMPLED
from aamoe_jax.mixers.build import costs
from aamoe_jax.mixers.clustered import ClusteredAttentionConfig
from aamoe_jax.mixers.costs import Costs, Setting
from aamoe_jax.mixers.experts import MoEConfig
from aamoe_jax.mixers.filtered import FilteredAttentionConfig
from aamoe_jax.mixers.sparse_attention import SparseAttentionConfig
from aamoe_jax.registry import MIXERS
from pallas_kernels.block_sparse_attention import Pairs, block_sparse_attention, xla
from pallas_kernels.block_sparse_attention.operation import Problem

ROWS, LENGTH = 32, 512
CONFIG = ModelConfig(
    d_model=1024, num_heads=8, num_layers=1, kernel="xla", aamoe=AAMoEConfig(chunk_size=16, num_experts=16)
)
SMALL = dataclasses.replace(
    CONFIG, d_model=64, num_heads=4, num_kv_heads=2, d_ff=96, dtype="bfloat16", own=(ClusteredAttentionConfig(8),)
)


def exact(name: str, config: ModelConfig, rows: int, length: int) -> Costs:
    """What the mixer says of itself."""
    return costs(name, Setting(config, rows, length))


def assert_agreement(name, config):
    mine, theirs = exact(name, config, ROWS, LENGTH), compiled(name, config, ROWS, LENGTH)
    assert mine.prefill_flops == pytest.approx(theirs.prefill_flops, rel=0.05)
    assert mine.decode_flops == pytest.approx(theirs.decode_flops, rel=0.05)
    assert mine.activation_bytes == pytest.approx(theirs.activation_bytes, rel=0.25)


@pytest.mark.parametrize("name", MIXERS)
def test_dec_13_14_the_compiler_agrees(name):
    """FLOPs (DEC-13, AA-37) and what is held for the backward pass (DEC-14)."""
    assert_agreement(name, CONFIG)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("filtered_attention", {"own": (FilteredAttentionConfig("message_norm", capacity=0.25),)}),
        ("moe", {"own": (MoEConfig(router="attention", router_input="causal_conv"),)}),
        ("aamoe", {"aamoe": dataclasses.replace(CONFIG.aamoe, expert_gate=True, budget=BudgetConfig(load_price=0.5))}),
        (
            "aamoe",
            {"aamoe": dataclasses.replace(CONFIG.aamoe, router="pooled", key_convolution=True, query_convolution=True)},
        ),
        (
            "aamoe",
            {"aamoe": dataclasses.replace(CONFIG.aamoe, expert_router="attention", router_input="causal_conv")},
        ),
        ("approximate", {"num_kv_heads": 2}),
        ("random_qk", {"num_kv_heads": 2}),
    ],
)
def test_dec_13_14_the_compiler_agrees_where_fields_differ(name, fields):
    assert_agreement(name, dataclasses.replace(CONFIG, **fields))


def saved_bytes(name, config, rows, length):
    """Of the arrays that the forward pass returns for the backward pass; nothing is compiled."""
    trial = Trial(name, config)
    _, saved = jax.eval_shape(trial.forward, *trial.shapes(rows, length))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in saved)


@pytest.mark.parametrize("name", MIXERS)
def test_dec_14_in_bfloat16_with_groups_of_heads(name):
    """The same where maps are not most of it."""
    config = SMALL
    saved = saved_bytes(name, config, 3, 96)
    assert exact(name, config, 3, 96).activation_bytes == pytest.approx(saved, rel=0.25)


def test_dec_13_heads_of_filtered_attention_are_computed_one_after_the_other():
    """Where one block of one head is much of what there is."""
    config = dataclasses.replace(CONFIG, d_model=64, d_ff=64, own=(FilteredAttentionConfig("message_norm"),))
    mine, theirs = (count("filtered_attention", config, 1, 256) for count in (exact, compiled))
    assert mine.prefill_flops == pytest.approx(theirs.prefill_flops, rel=0.05)


def test_dec_14_what_a_router_of_aamoe_keeps():
    aamoe = dataclasses.replace(SMALL.aamoe, router="pooled", num_experts=1024)
    config = dataclasses.replace(SMALL, num_heads=8, aamoe=aamoe)
    mine, held = (count("aamoe", config, 3, 96) for count in (exact, saved_bytes))
    assert mine.activation_bytes == pytest.approx(held, rel=0.1)


@pytest.mark.parametrize("name", MIXERS)
def test_dec_15_cache_bytes_are_those_of_the_arrays(name):
    """To the byte, in bfloat16, with groups of heads, at a length that is no multiple of anything."""
    own = MoEConfig(router_input="causal_conv"), FilteredAttentionConfig(capacity=0.3)
    aamoe = dataclasses.replace(SMALL.aamoe, router_input="causal_conv", key_convolution=True)
    config = dataclasses.replace(SMALL, aamoe=aamoe, own=(*SMALL.own, *own))
    trial = Trial(name, config)
    arrays = trial.cache_shapes(3, 101)
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))
    assert exact(name, config, 3, 101).cache_bytes == held


class TestLoops:
    """What the compiler does not count of a loop is what `beyond_one_turn` says."""

    def test_it_counts_one_turn_of_the_loop_over_pairs(self):
        tokens, heads, size, resources, m, slots = 2048, 4, 128, 48, 32, 8
        problem = Problem(tokens, heads, size, resources, m, slots, jnp.dtype("float32"), 32, tokens * slots, 1.0)
        path = xla.plan(problem)
        shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
        integers = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        pairs = Pairs(integers((tokens, slots)), shape((tokens, slots)), integers((tokens, slots)), integers((tokens,)))
        query, key = shape((tokens, heads, size)), shape((resources, m, heads, size))
        attend = functools.partial(
            block_sparse_attention, num_context=32, max_pairs=tokens * slots, implementation="xla"
        )
        counted = jax.jit(attend).lower(query, query, key, key, pairs).compile().cost_analysis()["flops"]
        turn = 4 * path.group * path.tile * m * heads * size
        assert counted == pytest.approx(turn, rel=0.05)

    def test_experts_run_as_many_turns_as_their_blocks(self):
        """A loop for every size of blocks, of which the compiler counts one turn each."""
        more = beyond_one_turn("moe", CONFIG, ROWS, LENGTH)
        assert more.prefill_flops == 4 * 1024 * 2048 * (ROWS * LENGTH * 2 - (512 + 256 + 128 + 64))
        assert more.decode_flops == 4 * 1024 * 2048 * (ROWS * 2 - ROWS)

    def test_attention_runs_as_many_turns_as_it_has_blocks(self):
        more = beyond_one_turn("attention", CONFIG, ROWS, LENGTH)
        assert more == Costs(prefill_flops=4 * 1024 * ROWS * 128**2 * (10 - 1))
        # A window over two blocks, every second token as a row of its own over two blocks, and those of the row ahead.
        halves = dataclasses.replace(CONFIG, own=(SparseAttentionConfig(stride=2),))
        more = beyond_one_turn("strided_attention", halves, ROWS, LENGTH)
        turn = 86**2  # 256 rows and the one ahead in blocks
        assert more.prefill_flops == 4 * 1024 * ROWS * (128**2 * (7 - 1) + 2 * turn * (6 - 1))

    def test_others_have_none(self):
        assert set(dataclasses.astuple(beyond_one_turn("feed_forward", CONFIG, ROWS, LENGTH))) == {0}


class TestPublished:
    """The formulas as printed, and what is wrong with them."""

    B, L, D, H, T = 3, 5, 8, 4, 2

    def value(self, text):
        return evaluate(text, Symbols(self.B, self.L, self.D, self.H, self.T))

    def test_a_formula_is_read(self):
        B, L, D, H, T = self.B, self.L, self.D, self.H, self.T
        assert self.value("8BLd + 2BL²h/t") == 8 * B * L * D + 2 * B * L**2 * H / T
        assert self.value("11BLd/t + 3Bd²/ht") == 11 * B * L * D / T + 3 * B * D**2 / (H * T)
        assert self.value("0") == 0
        for broken in ("2(B+1)Ld", "", "4BLd -", "B^2"):
            with pytest.raises(ValueError, match="no product"):
                self.value(broken)

    def test_dec_13_14_15_all_are_as_printed(self):
        """Prefill and decode FLOPs, activation and cache bytes, written down once more."""
        B, L, d, h, t = self.B, self.L, self.D, self.H, self.T
        projections, step = 6 * B * L * d**2, 6 * B * d**2
        standard = (
            *(4 * B * L**2 * d + projections, step + 4 * B * L * d),
            *(8 * B * L * d + 2 * B * L**2 * h / t, 4 * B * L * d),
        )
        fixed = (
            *(2 * L**2 * d + 2 * B * L**2 * d + projections, 2 * L * d + 2 * B * L * d + step),
            *(4 * B * L * d + 8 * L * d + 2 * L**2 * h / t, 2 * (B + 1) * L * d),
        )
        approximate = 14 * B * L * d**2, 10 * B * d**2, 11 * B * L * d / t + 3 * B * d**2 / (h * t)
        printed = {
            "attention": standard,
            "mlp": (projections, step, 8 * B * L * d / t, 0),
            "approximate": (*approximate, 6 * B * d + 4 * B * d**2 / h),
            "non_approximate": (projections, step, 8 * B * L * d + 4 * B * L * h / t, 2 * B * d + 4 * B * h),
            "random_qk": fixed,
            "fixed_qk": fixed,
            "static_qk": standard,
        }
        quantities = "prefill_flops", "decode_flops", "activation_bytes", "cache_bytes"
        found = {name: tuple(self.value(formula(name, quantity)) for quantity in quantities) for name in printed}
        assert found == printed
        assert set(PRINTED) == {*printed, "aamoe"}

    def test_dec_13_slips_are_named_and_put_right(self):
        B, L, D, H = self.B, self.L, self.D, self.H
        assert self.value(formula("approximate", "prefill_flops")) == 14 * B * L * D**2
        right = self.value(formula("approximate", "prefill_flops", "corrected"))
        assert right == 6 * B * L * D**2 + 8 * B * L * D**2 / H
        right = self.value(formula("random_qk", "prefill_flops", "corrected"))
        assert right == 2 * L**2 * D + 2 * B * L**2 * D + 4 * L * D**2 + 2 * B * L * D**2
        assert self.value(PRECOMPUTED_SLIP.corrected["decode_flops"]) == 2 * B * L * D + 2 * B * D**2
        for name, slip in SLIPS.items():
            for quantity, text in slip.corrected.items():
                assert self.value(text) < self.value(formula(name, quantity))

    def test_what_was_not_published_has_no_formula(self):
        assert formula("moe", "prefill_flops") is None
        assert formula("aamoe", "activation_bytes") is None

    def test_dec_13_exact_is_corrected_and_what_it_leaves_out(self):
        """W^O, and no more; in one row, where a fixed sequence costs what a row does. Of whole squares attention leaves
        out the blocks of the future, and looks at some logits again."""
        config = dataclasses.replace(CONFIG, qk_norm="none")
        symbols, projection = symbols_of(config, 1, LENGTH), 2 * LENGTH * config.d_model**2
        for name in ("attention", "mlp", "non_approximate", "random_qk", "fixed_qk", "static_qk"):
            published = evaluate(formula(name, "prefill_flops", "corrected"), symbols)
            blocks = name not in ("mlp", "non_approximate")
            future = 4 * config.d_model * (LENGTH**2 - 10 * 128**2) if blocks else 0
            again = 2 * config.d_model * LENGTH * SAMPLED if blocks else 0
            assert exact(name, config, 1, LENGTH).prefill_flops - published == projection - future + again, name

    def test_dec_15_sums_are_kept_in_float32(self):
        """Caches of keys and values are as published; sums take twice as much; a fixed sequence keeps queries too."""
        config, (rows, length) = dataclasses.replace(SMALL, num_kv_heads=None), (3, 40)
        symbols = symbols_of(config, rows, length)
        cached = {name: exact(name, config, rows, length).cache_bytes for name in PRINTED}
        published = {name: evaluate(formula(name, "cache_bytes"), symbols) for name in PRINTED}
        for name, ratio in {"attention": 1, "static_qk": 1, "mlp": 1, "approximate": 2, "non_approximate": 2}.items():
            assert cached[name] == ratio * published[name], name
        assert cached["random_qk"] == published["random_qk"] + 2 * length * config.d_model

    def test_aa_37_aamoe_is_its_closed_form(self):
        """The ledger of AA-MoE beside the code, which computes windows over two chunks of keys."""
        layer = AAMoEConfig(chunk_size=16, num_experts=16, local="chunk", budget=BudgetConfig(beta=3.0))
        config = dataclasses.replace(CONFIG, aamoe=layer, qk_norm="none")
        published = evaluate(formula("aamoe", "prefill_flops"), symbols_of(config, 2, LENGTH))
        # Whole squares of chunk scores, not those before the token alone; and the score of its own neighbourhood.
        more = 2 * LENGTH * (config.d_model * LENGTH / 16 + 2 * config.d_model)
        assert exact("aamoe", config, 2, LENGTH).prefill_flops == published + more


def test_the_report_names_every_mixer_and_slip():
    text = report(SMALL, 2, 64, "paper")
    assert all(f"| {name} " in text for name in MIXERS)
    assert all(slip.why in text for slip in (*SLIPS.values(), PRECOMPUTED_SLIP))
    assert "over compiled" not in text
