"""AA-32, decision 36: two experiments of similar size, by one field, or a refusal that says why."""

import pytest

from aamoe_jax.config import ConfigError
from experiments.binding import load_experiment, rebound
from experiments.matching import active_flops, match, parameters
from tests.launch.session import calls

TINY = ("ModelConfig.d_model = 32", "ModelConfig.num_heads = 2", "ModelConfig.num_layers = 2")


def experiment(name, *params):
    return load_experiment([name], [*TINY, *params])


AAMOE, DENSE = experiment("aamoe.gin"), experiment("dense.gin")
WIDE = experiment("dense.gin", "ModelConfig.d_ff = 32_768")


class TestAA32:
    @pytest.mark.parametrize(
        ("name", "field"),
        [
            ("dense.gin", "ModelConfig.d_ff"),
            ("moe.gin", "MoEConfig.expert_width"),
            ("uniform.gin", "AAMoEConfig.num_experts"),
        ],
    )
    def test_equal_parameters(self, name, field):
        found = match(AAMOE, experiment(name), [field], "parameters")
        assert parameters(found.config) == pytest.approx(parameters(AAMOE), rel=0.01)
        assert rebound(experiment(name), found.values) == found.config

    def test_what_was_far_from_the_reference_meets_it(self):
        assert parameters(WIDE) > 2 * parameters(AAMOE)
        found = match(AAMOE, WIDE, ["ModelConfig.d_ff"], "parameters")
        assert parameters(found.config) == pytest.approx(parameters(AAMOE), rel=0.01)

    @pytest.mark.parametrize(
        ("field", "other"),
        [
            ("BudgetConfig.beta", experiment("aamoe.gin")),
            ("ModelConfig.d_ff", experiment("moe.gin", "MoEConfig.expert_width = None")),
            ("MoEConfig.expert_width", experiment("switch.gin")),
        ],
    )
    def test_equal_active_flops(self, field, other):
        found = match(DENSE, other, [field], "flops")
        assert active_flops(found.config, 1024) == pytest.approx(active_flops(DENSE, 1024), rel=0.01)

    def test_spent_pairs_are_counted_at_full_budget(self):
        more = experiment("aamoe.gin", "BudgetConfig.beta = 5.0")
        assert active_flops(more, 1024) - active_flops(AAMOE, 1024) == 2 * 4 * 64 * 32
        capped = experiment("aamoe.gin", "AAMoEConfig.max_resources = 4", "BudgetConfig.beta = 5.0")
        assert active_flops(capped, 1024) == active_flops(AAMOE, 1024)

    def test_widths_stay_divisible_by_heads_and_depths_by_the_pattern(self):
        wide = experiment("dense.gin", "ModelConfig.d_ff = 128")
        reference = rebound(wide, {"ModelConfig.d_model": 224})
        assert match(reference, wide, ["ModelConfig.d_model"], "parameters").values == {"ModelConfig.d_model": 224}
        hybrid = experiment("aamoe.gin", "ModelConfig.pattern = ('aamoe', 'parallel')")
        deep = rebound(hybrid, {"ModelConfig.num_layers": 62})
        assert match(deep, hybrid, ["ModelConfig.num_layers"], "flops").values == {"ModelConfig.num_layers": 62}

    def test_stops_where_validity_ends(self):
        """The line through the first two sizes, which attention bends, leads to a depth of 1.55."""
        deep = load_experiment(["mixture_of_depths.gin"], ["DataConfig.seq_len = 16384"])
        wanted = rebound(deep, {"MixtureOfDepthsConfig.capacity": 0.7})
        assert match(wanted, deep, ["MixtureOfDepthsConfig.capacity"], "flops").values == {
            "MixtureOfDepthsConfig.capacity": 0.7
        }
        whole = rebound(deep, {"MixtureOfDepthsConfig.capacity": 1.0})
        assert match(whole, deep, ["MixtureOfDepthsConfig.capacity"], "flops").values == {
            "MixtureOfDepthsConfig.capacity": 1.0
        }

    @pytest.mark.parametrize("heads", [1, 4, 6, 12])
    def test_divisors_are_found_one_by_one(self, heads):
        grouped = experiment("dense.gin", "ModelConfig.d_model = 48", "ModelConfig.num_heads = 12")
        wanted = rebound(grouped, {"ModelConfig.num_kv_heads": heads})
        assert match(wanted, grouped, ["ModelConfig.num_kv_heads"], "parameters").values == {
            "ModelConfig.num_kv_heads": heads
        }

    @pytest.mark.parametrize(
        ("reference", "other", "field", "equal", "why"),
        [
            (DENSE, AAMOE, "ModelConfig.norm", "flops", "is no number"),
            (DENSE, AAMOE, "ModelConfig.width", "flops", "no field is called"),
            (WIDE, AAMOE, "AAMoEConfig.max_resources", "parameters", "more adds nothing"),
            (DENSE, AAMOE, "BudgetConfig.slack", "flops", "more adds nothing"),
            (WIDE, DENSE, "OptimizerConfig.beta1", "parameters", "the closest is"),
            (WIDE, DENSE, "ModelConfig.num_kv_heads", "parameters", r"the closest is 2, with 0\.\d+ times"),
            (WIDE, experiment("moe.gin"), "MoEConfig.top_k", "flops", r"the closest is 8, with 0\.\d+ times"),
            (WIDE, DENSE, "MixtureOfDepthsConfig.capacity", "flops", r"the closest is 1\.0, with 0\.\d+ times"),
            (AAMOE, DENSE, "ModelConfig.num_layers", "flops", r"the closest is 1, with \d\.\d+ times the flops"),
        ],
    )
    def test_refuses_what_cannot_be(self, reference, other, field, equal, why):
        with pytest.raises(ConfigError, match=why):
            match(reference, other, [field], equal)

    def test_width_and_hidden_width_grow_together_and_the_last_closes_the_gap(self):
        wide = experiment("dense.gin", "ModelConfig.d_model = 64", "ModelConfig.d_ff = 192")
        fields = ["ModelConfig.d_model", "ModelConfig.d_ff"]
        found = match(AAMOE, wide, fields, "flops")
        width, hidden = (found.values[field] for field in fields)
        assert active_flops(found.config, 1024) == pytest.approx(active_flops(AAMOE, 1024), rel=0.01)
        assert width < 64
        assert 1.5 < hidden / width < 6, "not far from the proportion of 3 that they had, by steps of 4 in width"
        alone = match(AAMOE, rebound(wide, {"ModelConfig.d_model": width}), fields[1:], "flops")
        assert alone.values["ModelConfig.d_ff"] == hidden

    def test_a_width_alone_may_come_as_near_as_it_can(self):
        pattern = "ModelConfig.pattern = ('attention',)"
        reference, other = (
            experiment("dense.gin", pattern, "ModelConfig.d_model = 60"),
            experiment("dense.gin", pattern),
        )
        fields = ["ModelConfig.d_model", "ModelConfig.d_ff"]
        found = match(rebound(reference, {"ModelConfig.num_layers": 3}), other, fields, "flops", 0.1)
        assert 0.01 < abs(found.ratio - 1) < 0.1
        with pytest.raises(ConfigError, match=r"ModelConfig\.d_ff"):
            match(rebound(reference, {"ModelConfig.num_layers": 3}), other, fields, "flops")

    def test_no_parameter_is_made(self):
        assert parameters(experiment("dense.gin", "ModelConfig.d_ff = 2_000_000_000")) > 1e11


class TestProgram:
    def test_prints_the_table_and_the_binding(self):
        files = ["--gin_file=aamoe.gin", "--gin_file=dense.gin", *(f"--gin_param={param}" for param in TINY)]
        field = ["--field=ModelConfig.d_ff", "--equal=parameters"]
        done, refused, alone = calls(
            "match", [[*files, *field], [*files, "--field=ModelConfig.norm"], [files[0], *field]]
        )
        assert done.code == 0, done.stderr
        found = match(AAMOE, DENSE, ["ModelConfig.d_ff"], "parameters")
        assert done.stdout.rstrip().endswith(f"--gin_param='ModelConfig.d_ff = {found.values['ModelConfig.d_ff']}'")
        assert f"| {parameters(AAMOE):,} " in done.stdout
        assert f"| {parameters(found.config):,} " in done.stdout
        assert (refused.code, refused.stdout) == (1, "")
        assert refused.stderr == "error: ModelConfig.norm is no number: nothing can be found along it\n"
        assert "give --gin_file twice" in alone.stdout + alone.stderr
