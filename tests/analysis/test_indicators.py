"""Indicators of attention maps in closed form, and maps of whole stacks (DEC-17)."""

from __future__ import annotations

import numpy as np
import pytest

from aamoe_jax.analysis.indicators import attention_maps, indicators, mapped_blocks, table
from aamoe_jax.config import ConfigError
from tests.aamoe.helpers import model_config
from tests.evaluation.helpers import random_params
from tests.test_model import tokens_of

H, L = 3, 7


def uniform() -> np.ndarray:
    """Every token weighs all up to itself alike."""
    one = np.tril(np.ones((L, L))) / np.arange(1, L + 1)[:, None]
    return np.tile(one, (H, 1, 1))


def one_hot(distance: int) -> np.ndarray:
    """Every token looks at the one so far before it, the first ones at the first."""
    return np.tile(np.eye(L)[np.maximum(np.arange(L) - distance, 0)], (H, 1, 1))


class TestDEC17:
    def test_of_a_uniform_map(self):
        i = np.arange(1, L + 1)
        found = indicators(uniform())
        assert found.context == pytest.approx(1)
        assert found.entropy == pytest.approx(np.log(i).mean())
        assert found.concentration == pytest.approx(np.sqrt((1 / i).sum()))
        assert found.head_diversity == pytest.approx(0, abs=1e-15)
        assert found.sink == pytest.approx((1 / i).mean())
        for distance in range(4):
            assert found.local_focus[distance] == pytest.approx((1 / i[distance:]).mean())

    @pytest.mark.parametrize("distance", [0, 1, 3])
    def test_of_a_one_hot_map(self, distance):
        found = indicators(one_hot(distance))
        assert found.entropy == found.head_diversity == 0
        assert found.concentration == pytest.approx(np.sqrt(L))
        assert found.sink == pytest.approx((distance + 1) / L)
        # The first tokens look at the first one: 1 of those that are n < distance places behind it.
        wanted = [1.0 if n == distance else 1 / (L - n) if n < distance else 0.0 for n in range(4)]
        assert found.local_focus == pytest.approx(wanted)

    def test_heads_that_differ_are_diverse(self):
        """Two heads, one on the token itself and one on the token before: they differ by 1 in two places a row, but for
        the first row."""
        both = np.stack([one_hot(0)[0], one_hot(1)[0]])
        assert indicators(both).head_diversity == pytest.approx(0.5 * 2 * (L - 1) * 2 / (L * (L + 1)))

    def test_a_negative_weight_has_no_entropy(self):
        attention = np.zeros((1, 2, 2))
        attention[0] = [[1, 0], [2, -1]]
        found = indicators(attention)
        assert np.isnan(found.entropy)
        assert found.concentration == pytest.approx(np.sqrt(6))

    def test_every_mixer_of_the_attention_kind_in_a_stack_has_its_map(self):
        pattern = ("approximate+mlp", "fixed_qk+static_qk+feed_forward", "local_attention", "non_approximate+parallel")
        config = model_config(pattern=pattern, num_layers=8)
        names = [(0, "approximate"), (1, "fixed_qk"), (1, "static_qk"), (2, "local_attention"), (3, "non_approximate")]
        blocks = [*names, (3, "parallel")]
        assert mapped_blocks(config) == [*blocks, *((layer + 4, name) for layer, name in blocks)]
        found = attention_maps(config, random_params(config), np.asarray(tokens_of(1, L))[0])
        assert [(layer, mixer) for layer, mixer, _ in found] == mapped_blocks(config)
        for _, mixer, attention in found:
            assert attention.shape == (4, L, L)
            assert (np.triu(attention, 1) == 0).all()
            if mixer != "approximate":  # whose sums may be cut
                np.testing.assert_allclose(attention.sum(-1), 1, atol=1e-5)
        lines = table(found).splitlines()
        assert len(lines) == 13
        figures = indicators(found[3].attention)
        assert lines[4].split()[:4] == ["2", "local_attention", f"{figures.context:.3f}", f"{figures.entropy:.3f}"]

    def test_all_attention_and_aamoe_have_maps_of_what_tokens_get(self):
        config = model_config(pattern=("aamoe", "all_attention"), num_layers=2, null_slot="learned")
        found = attention_maps(config, random_params(config), np.asarray(tokens_of(1, L))[0])
        assert [(layer, mixer) for layer, mixer, _ in found] == [(0, "aamoe"), (1, "all_attention")]
        for _, _, attention in found:
            assert attention.shape == (4, L, L)
            assert (np.triu(attention, 1) == 0).all()
            assert (attention.sum(-1) < 1).all()
            assert 0 < indicators(attention).context < 1

    def test_a_stack_without_maps_is_refused(self):
        config = model_config(pattern=("mlp",))
        with pytest.raises(ConfigError, match="no mixer of it has an attention map"):
            attention_maps(config, {}, np.zeros(1, np.int32))
