"""The grammar of stacks (DEC-09, DEC-10)."""

import pytest

from aamoe_jax.config import ConfigError, ModelConfig
from aamoe_jax.patterns import PLACEMENTS, expand, placement

# Table 11 of Xue, Moosavi and Aletras: the standard layers of each hybrid of 24.
TABLE_11 = {
    "even": set(range(2, 25, 2)),
    "odd": set(range(1, 24, 2)),
    "top": set(range(1, 13)),
    "middle": {*range(1, 7), *range(19, 25)},
    "bottom": set(range(13, 25)),
    "quarter": {4, 8, 12, 16, 20, 24},
    "first": {1},
    "last": {24},
    "bilateral": {1, 24},
}


class TestDEC10:
    @pytest.mark.parametrize("name", PLACEMENTS)
    def test_the_nine_hybrids_of_24_layers(self, name):
        config = ModelConfig(num_layers=24, pattern=(f"{name}(attention + feed_forward, aamoe)",))
        assert set(PLACEMENTS) == set(TABLE_11)
        assert {1 + layer for layer in config.layers_of("attention")} == TABLE_11[name] == placement(name, 24)
        assert len(config.layers_of("aamoe")) + len(TABLE_11[name]) == 24

    def test_counts_repeat_and_the_period_is_the_shortest(self):
        assert expand(("aamoe*3", "parallel"), 8) == ("aamoe", "aamoe", "aamoe", "parallel")
        assert expand(("even(parallel, aamoe)",), 6) == ("aamoe", "parallel")
        assert expand(("aamoe*6",), 6) == ("aamoe",)
        assert ModelConfig(num_layers=4, pattern=("aamoe", "parallel") * 2) == ModelConfig(
            num_layers=4, pattern=("aamoe", "parallel")
        )


class TestDEC09:
    def test_a_uniform_stack_is_a_pattern_of_one(self):
        assert ModelConfig(num_layers=24, pattern=("all_attention",)).layers_of("all_attention") == tuple(range(24))


def test_mixers_of_a_layer_share_its_place_and_its_budget():
    config = ModelConfig(num_layers=4, pattern=("aamoe+feed_forward", "parallel"))
    assert config.mixers == ((0, "aamoe"), (0, "feed_forward"), (1, "parallel"))
    assert config.layers_of("feed_forward") == (0, 2)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ((), r"ModelConfig.pattern = \(\): must name at least one mixer"),
        (("aamoe*3",), r"comes to 3 layers, which do not divide num_layers = 4"),
        (("evn(aamoe, parallel)",), "'evn' is no placement; there are even, odd"),
        (("even(aamoe)",), r"write 'mixer', 'mixer\+mixer', 'layer\*3' or"),
        (("aamoe*0",), "'aamoe\\*0': write 'mixer'"),
        (("aamoe+paralel",), r"'paralel' is no mixer; did you mean 'parallel'\?"),
        (("aamoe+aamoe",), "layer 'aamoe\\+aamoe' has 'aamoe' twice"),
    ],
)
def test_refusals_name_the_entry(pattern, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(num_layers=4, pattern=pattern)
