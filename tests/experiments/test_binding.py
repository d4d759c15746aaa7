"""gin files bind the schema and nothing else, and every mistake is one line that says where it stands."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest

from aamoe_jax.config import RENAMED, BudgetConfig, ConfigError, ExperimentConfig, ModelConfig
from aamoe_jax.registry import MIXERS, own_configs
from experiments.binding import (
    CONFIGS,
    bindable_fields,
    config_classes,
    conform,
    describe,
    differences,
    load_experiment,
    operative_gin,
)

SHIPPED = sorted(path.name for path in CONFIGS.glob("*.gin"))

OLD_VALUES = {
    "AttentionConfig.window": 7,
    "AttentionConfig.stride": 5,
    "AttentionConfig.sinks": 2,
    "AttentionConfig.filter": "none",
    "AttentionConfig.filter_threshold": 0.25,
    "AttentionConfig.filter_room": 0.75,
    "AttentionConfig.clusters": 9,
    "AttentionConfig.clusters_kept": 3,
    "ModelConfig.depth_capacity": 0.5,
    "ModelConfig.fixed_tokens": "ids.npy",
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a gin file into the working directory and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write_file(text: str, name: str = "run.gin") -> str:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
        return name

    return write_file


def refusal(files: list[str], params: list[str]) -> str:
    """The complaint about an experiment, which must be one line."""
    with pytest.raises(ConfigError) as caught:
        load_experiment(files, params)
    message = str(caught.value)
    assert "\n" not in message
    return message


class TestLoading:
    def test_nothing_bound_is_the_schema_with_its_defaults(self):
        assert load_experiment() == ExperimentConfig()

    def test_nested_config_classes_are_composed_from_their_own_bindings(self):
        config = load_experiment(
            [], ["BudgetConfig.beta = 2.5", "AAMoEConfig.num_experts = 8", "TrainingConfig.seed = 7"]
        )
        assert config.model.aamoe.budget.beta == 2.5
        assert config.model.aamoe.num_experts == 8
        assert config.training.seed == 7

    def test_the_last_binding_wins_and_params_win_over_files(self, write):
        first = write("ModelConfig.d_model = 64\nTrainingConfig.steps = 1\nTrainingConfig.seed = 1\n", "first.gin")
        second = write("TrainingConfig.steps = 2\nTrainingConfig.seed = 2\n", "second.gin")
        config = load_experiment([first, second], ["TrainingConfig.seed = 3", "TrainingConfig.seed = 4"])
        assert (config.model.d_model, config.training.steps, config.training.seed) == (64, 2, 4)

    def test_macros_are_read_last_so_that_a_param_can_change_them(self, write):
        file = write("width = 128\nModelConfig.d_model = %width\nModelConfig.d_ff = %width\n")
        assert load_experiment([file]).model.d_model == 128
        changed = load_experiment([file], ["width = 64"]).model
        assert (changed.d_model, changed.d_ff) == (64, 64)

    def test_macros_inside_containers(self, write):
        file = write("weight = 2\nDataConfig.mixture = (('code', %weight), ('books', 1))\n")
        assert load_experiment([file]).data.mixture == (("code", 2.0), ("books", 1.0))

    def test_an_include_is_looked_for_beside_its_file_and_may_be_overridden_below(self, write):
        write("ModelConfig.d_model = 32\nModelConfig.num_layers = 2\n", "deep/base.gin")
        file = write("include 'base.gin'\nModelConfig.num_layers = 6\n", "deep/top.gin")
        model = load_experiment([file]).model
        assert (model.d_model, model.num_layers) == (32, 6)

    def test_a_shipped_config_can_be_included_by_name(self, write):
        file = write("include 'aamoe.gin'\nTrainingConfig.steps = 3\n")
        assert set(differences(load_experiment(["aamoe.gin"]), load_experiment([file]))) == {"TrainingConfig.steps"}

    def test_a_file_here_hides_a_shipped_one_of_the_same_name_and_says_so(self, write, caplog):
        load_experiment(["aamoe.gin"])
        assert caplog.text == ""
        assert load_experiment([write("TrainingConfig.steps = 3\n", "aamoe.gin")]).training.steps == 3
        assert "aamoe.gin is used, not the shipped config of that name" in caplog.text

    def test_blocks(self, write):
        file = write("ModelConfig:\n    d_model = 64  # narrow\n    num_layers = 2\n")
        assert load_experiment([file]).model == ModelConfig(d_model=64, num_layers=2)

    def test_one_load_leaves_no_trace_in_the_next(self):
        load_experiment([], ["ModelConfig.d_model = 64", "width = 8", "ModelConfig.d_ff = %width"])
        refusal([], ["ModelConfig.norm = 3"])
        assert load_experiment() == ExperimentConfig()
        assert "no macro is called 'width'" in refusal([], ["ModelConfig.d_ff = %width"])


class TestUnknownNames:
    @pytest.mark.parametrize(
        ("binding", "complaint"),
        [
            ("ModelConfig.d_modle = 3", "ModelConfig has no field 'd_modle'; did you mean 'd_model'?"),
            ("ModelConfg.d_model = 3", "no config is called 'ModelConfg'; did you mean 'ModelConfig.d_model'?"),
            ("AAMoEConfig.beta = 3.0", "AAMoEConfig has no field 'beta'; did you mean 'BudgetConfig.beta'?"),
            ("Budget.beta = 3.0", "no config is called 'Budget'; did you mean 'BudgetConfig.beta'?"),
            (
                "ModelConfig.aamoe = None",
                "ModelConfig.aamoe is put together from the fields of AAMoEConfig: bind those",
            ),
            ("ModelConfig.d_model = %width", "no macro is called 'width'"),
            ("ModelConfig.d_model = @width()", "@width(): fields hold plain values, not functions"),
            ("import no_such_module", "import 'no_such_module': no module is called so"),
            ("import json", "import 'json': "),
            ("from os import path", "write 'import os.path', without from and as"),
        ],
    )
    def test_file_and_line_or_the_param_are_named(self, binding, complaint, write):
        assert f"run.gin:2: {complaint}" in refusal([write(f"# a comment\n{binding}\n")], [])
        assert f"--gin_param {binding!r}: {complaint}" in refusal([], [binding])

    def test_a_name_like_nothing_else_lists_the_config_classes(self):
        assert "there are AAMoEConfig, BudgetConfig, ClusteredAttentionConfig, DataConfig" in refusal(
            [], ["Zzz.qqq = 1"]
        )

    def test_in_a_block(self, write):
        assert refusal([write("ModelConfig:\n    d_model = 64\n    d_hidden = 3\n")], []).startswith("run.gin:3: ")

    def test_a_misspelt_macro(self, write):
        file = write("width = 64\nModelConfig.d_model = %widht\n")
        assert refusal([file], []) == "run.gin:2: no macro is called 'widht'; did you mean 'width'?"

    def test_files(self, write):
        assert refusal(["amoe.gin"], []) == "no gin file is called 'amoe.gin'; did you mean 'aamoe.gin'?"
        file = write("\ninclude 'nowhere/at_all'\n")
        assert refusal([file], []).startswith("run.gin:2: no gin file is called 'nowhere/at_all'; those shipped are ")


class TestNothingConsumed:
    def test_a_scope(self, write):
        complaint = "run.gin:1: nothing is built in the scope 'foo', so foo/ModelConfig.d_model would bind nothing"
        assert refusal([write("foo/ModelConfig.d_model = 3\n")], []).startswith(complaint)
        assert refusal([write("foo/ModelConfig:\n    d_model = 3\n")], []).startswith(complaint.replace(":1:", ":2:"))

    def test_an_unused_macro(self):
        complaint = "no binding uses the macro 'd_model'; did you mean 'ModelConfig.d_model'?"
        assert refusal([], ["d_model = 3"]) == f"--gin_param 'd_model = 3': {complaint}"

    def test_a_macro_that_only_unused_macros_use(self):
        assert "no binding uses the macro" in refusal([], ["one = %other", "other = 3"])


class TestTypes:
    @pytest.mark.parametrize(
        ("binding", "complaint"),
        [
            ("ModelConfig.d_model = 3.5", "ModelConfig.d_model = 3.5: expected int"),
            ("ModelConfig.d_model = True", "ModelConfig.d_model = True: expected int"),
            ("ModelConfig.d_model = None", "ModelConfig.d_model = None: expected int"),
            ("ModelConfig.norm = 'rsm'", "ModelConfig.norm = 'rsm': expected 'rms' | 'layer'; did you mean 'rms'?"),
            ("ModelConfig.d_ff = '64'", "ModelConfig.d_ff = '64': expected int | None"),
            ("ModelConfig.pattern = ('aamoe')", "expected tuple[str, ...]; did you mean ('aamoe',)?"),
            ("DataConfig.mixture = (('code',),)", "expected tuple[tuple[str, float], ...]"),
            ("BudgetConfig.beta = '8'", "BudgetConfig.beta = '8': expected float | tuple[float, ...]"),
            ("OptimizerConfig.learning_rate = True", "OptimizerConfig.learning_rate = True: expected float"),
            ("OptimizerConfig.clip_norm = 1e999", "OptimizerConfig.clip_norm = inf: expected float"),
        ],
    )
    def test_field_value_and_type_are_named(self, binding, complaint, write):
        message = refusal([write(f"{binding}\n")], [])
        assert message.startswith("run.gin:1: ")
        assert complaint in message

    @pytest.mark.parametrize(
        ("binding", "expected"),
        [
            ("BudgetConfig.beta = 8", 8.0),
            ("BudgetConfig.beta = [8, 4, 2, 1.5]", (8.0, 4.0, 2.0, 1.5)),
            ("ModelConfig.pattern = ['aamoe', 'parallel']", ("aamoe", "parallel")),
            ("ModelConfig.d_ff = None", None),
            ("ModelConfig.d_ff = 64", 64),
            ("DataConfig.mixture = [['code', 1]]", (("code", 1.0),)),
        ],
    )
    def test_what_is_accepted_arrives_in_the_type_of_the_field(self, binding, expected):
        name = binding.partition(" = ")[0]
        value = eval_field(load_experiment([], [binding]), name)
        assert value == expected
        assert type(value) is type(expected)

    def test_every_default_conforms_to_its_own_type(self):
        for field in bindable_fields().values():
            assert conform(field.default, field.hint) == field.default, field.full_name
            assert "typing" not in describe(field.hint)

    def test_unequal_types_are_told_apart(self):
        for value, hint in [(1, bool), (True, int), (1.5, int), ("1", float), (None, int), ((1,), tuple[int, int])]:
            with pytest.raises(TypeError):
                conform(value, hint)


def eval_field(config: ExperimentConfig, full_name: str):
    """The value of a field by its full name."""
    (line,) = [line for line in operative_gin(config).splitlines() if line.startswith(f"{full_name} = ")]
    return eval(line.partition(" = ")[2])


class TestDataclassRefusals:
    def test_pass_through_with_the_place_that_bound_the_value(self, write):
        file = write("\n\nModelConfig.d_model = 30\n")
        assert refusal([file], []) == "run.gin:3: ModelConfig.d_model = 30: must be divisible by num_heads = 4"

    def test_without_a_place_when_the_value_is_a_default(self):
        assert refusal([], ["AAMoEConfig.chunk_size = 48"]).startswith(
            "DataConfig.document_align = 64: must be a multiple"
        )


class TestText:
    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ("ModelConfig.norm = rms", "'rms' is no value: text needs quotes"),
            ("ModelConfig.d_model = (", "a bracket or quote is not closed"),
            ("ModelConfig.d_model", "expected ':' or '='"),
            ("ModelConfig.d_model = 3 4", "Expected newline"),
            ("ModelConfig.d_model =", "Unable to parse value"),
            ("a = %b\nb = %a\nModelConfig.d_model = %a", "the macro 'a' is defined by itself"),
            ("include 'run.gin'", "gin file 'run.gin' includes itself"),
        ],
    )
    def test_complaints_of_the_parser_are_one_line(self, text, complaint, write):
        message = refusal([write(f"{text}\n")], [])
        assert message.startswith("run.gin:1: ") or message.startswith("run.gin:2: ")
        assert complaint in message

    def test_a_file_that_is_no_text(self, tmp_path):
        (tmp_path / "noise.gin").write_bytes(b"\xff\xfe\x00")
        assert "cannot be read" in refusal([str(tmp_path / "noise.gin")], [])

    def test_no_truncation_of_a_good_file_goes_unnoticed_as_anything_but_a_config_error(self):
        text = (CONFIGS / "aamoe.gin").read_text()
        for end in range(0, len(text), 7):
            with contextlib.suppress(ConfigError):
                load_experiment([], [text[:end]])


class TestShipped:
    def test_the_configs_that_the_documentation_names(self):
        assert {"aamoe.gin", "aamoe_literal.gin", "quickstart.gin", "dense.gin", "all_attention.gin"} <= set(SHIPPED)

    @pytest.mark.parametrize("name", SHIPPED)
    def test_loads_and_survives_the_trip_through_its_operative_text(self, name, write):
        config = load_experiment([name])
        text = operative_gin(config)
        assert load_experiment([write(text)]) == config
        assert operative_gin(load_experiment([write(text)])) == text

    def test_the_literal_reading_and_the_decisions_differ_where_the_table_says(self):
        changed = differences(load_experiment(["aamoe.gin"]), load_experiment(["aamoe_literal.gin"]))
        assert changed == {
            "ModelConfig.norm": ("rms", "layer"),
            "ModelConfig.qk_norm": ("rms", "none"),
            "AAMoEConfig.local": ("window", "none"),
            "AAMoEConfig.router": ("pooled", "learned"),
            "AAMoEConfig.key_convolution": (True, False),
            "AAMoEConfig.query_convolution": (True, False),
            "AAMoEConfig.num_experts": (64, 61),
            "BudgetConfig.normalizer": ("prefix", "row"),
            "BudgetConfig.importance": ("bounded", "learned"),
        }

    def test_baselines_differ_from_aamoe_in_mixer_and_width_alone(self):
        for name in ("dense.gin", "all_attention.gin"):
            changed = differences(load_experiment(["aamoe.gin"]), load_experiment([name]))
            assert set(changed) == {"ModelConfig.pattern", "ModelConfig.d_ff"}


class TestOperative:
    def test_binds_every_field_even_of_awkward_values(self):
        """Those of mixers too, where the stack has them."""
        own = "+".join(name for name, entry in MIXERS.items() if entry.config is not None)
        config = ExperimentConfig(
            model=ModelConfig(num_layers=2, d_ff=7, pattern=("aamoe", own)),
            data=dataclasses.replace(ExperimentConfig().data, data_dir='it\'s \\ "quoted"\n', mixture=(("a", 1e-9),)),
        )
        text = operative_gin(config)
        bound = [line for line in text.splitlines() if line and not line.startswith("# --import=")]  # of other tests
        assert [line.partition(" = ")[0] for line in bound] == list(bindable_fields())
        assert load_experiment([], [text]) == config

    def test_a_budget_per_layer(self):
        budget = BudgetConfig(beta=(1.0, 2.0, 3.0, 4.0))
        aamoe = dataclasses.replace(ModelConfig().aamoe, budget=budget)
        config = ExperimentConfig(model=ModelConfig(aamoe=aamoe))
        assert load_experiment([], [operative_gin(config)]) == config


class TestRenamed:
    def test_old_names_bind_the_new_fields_with_a_warning(self, caplog):
        bindings = [f"{name} = {value!r}" for name, value in OLD_VALUES.items()]
        model = load_experiment([], ["ModelConfig.pattern = ('local_attention',)", *bindings]).model
        for name, value in OLD_VALUES.items():
            owner, field = RENAMED[name].split(".")
            assert getattr(model.of(own_configs()[owner]), field) == value
        assert OLD_VALUES.keys() == RENAMED.keys()
        assert "ModelConfig.depth_capacity is now MixtureOfDepthsConfig.capacity" in caplog.text

    def test_a_complaint_has_the_new_name(self):
        message = (
            "--gin_param 'AttentionConfig.window = 0': SparseAttentionConfig.window = 0: must be a positive number"
        )
        assert message in refusal([], ["AttentionConfig.window = 0"])

    def test_new_names_warn_of_nothing(self, caplog):
        load_experiment([], ["SparseAttentionConfig.window = 7"])
        assert caplog.text == ""


def test_configs_are_found_by_walking_the_schema():
    assert [cls.__name__ for cls in config_classes()] == [
        "ExperimentConfig",
        "ModelConfig",
        "AAMoEConfig",
        "BudgetConfig",
        "DataConfig",
        "OptimizerConfig",
        "TrainingConfig",
        "MeshConfig",
        *own_configs(),
    ]
