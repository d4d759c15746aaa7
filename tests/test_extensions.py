"""Mixers from outside the library: imported by name or path, bound in gin, named in checkpoints."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest

from aamoe_jax import extensions
from aamoe_jax.config import ConfigError, ExperimentConfig, ModelConfig, from_dict, to_dict
from aamoe_jax.extensions import import_again, import_mixers, imported
from aamoe_jax.mixers.base import Mixer
from aamoe_jax.registry import MIXERS, register
from aamoe_jax.training.resume import changed_fields
from experiments.binding import bindable_fields, differences, load_experiment, operative_gin

SOURCE = """
import dataclasses
from aamoe_jax import Mixer, register

@dataclasses.dataclass(frozen=True)
class {config}:
    gain: float = 1.0

@register("{name}", "its input, multiplied", config={config})
class Scaled(Mixer):
    def __call__(self, h, context):
        return self.config.of({config}).gain * h, {{}}
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes modules into the current folder; what they register is gone after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(extensions, "_imported", [])
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    names, modules = set(MIXERS), set(sys.modules)

    def write(file: str, name: str = "scaled", config: str = "ScaledConfig", source: str = SOURCE):
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(source.format(name=name, config=config))
        return path

    yield write
    for name in set(MIXERS) - names:
        del MIXERS[name]
    for name in set(sys.modules) - modules:
        del sys.modules[name]


class TestImport:
    @pytest.mark.parametrize("name", ["mine.py", "mine", "./mine.py"])
    def test_a_module_or_a_path_registers_its_mixers(self, name, write):
        path = write("mine.py")
        import_mixers(name)
        assert MIXERS["scaled"].summary == "its input, multiplied"
        assert imported() == ((name, str(path)),)
        assert ModelConfig(pattern=("scaled",)).mixers == ((0, "scaled"),)

    def test_a_module_of_a_package(self, write):
        path = write("package/mine.py")
        import_mixers("package.mine")
        assert imported() == (("package.mine", str(path)),)
        assert MIXERS["scaled"].cls.__module__ == "package.mine"

    def test_a_file_is_imported_once_whatever_it_is_called(self, write):
        path = write("mine.py")
        import_mixers("mine.py")
        first = MIXERS["scaled"].cls
        import_mixers("mine")
        import_mixers(str(path))
        assert MIXERS["scaled"].cls is first
        assert len(imported()) == 1

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("yours.py", "import 'yours.py': there is no such file in "),
            (
                "yours",
                "import 'yours': no module is called so; run from the folder that has yours.py, or give its path",
            ),
            ("a.b.c", "import 'a.b.c': no module is called so"),
            ("no-module", "must be a module such as my_mixers, or a path that ends in .py"),
            ("broken.py", "broken.py, line 2: ZeroDivisionError: division by zero"),
            ("empty.py", "empty.py registers no mixer: decorate a class with @register"),
            ("json.py", "another module is called 'json'"),
            ("taken.py", "ValueError: mixer name 'attention' is that of aamoe_jax.mixers.attention.CausalAttention"),
        ],
    )
    def test_refusals_say_what_is_wrong(self, name, message, write):
        write("broken.py", source="\n1 / 0\n")
        write("empty.py", source="x = 1\n")
        write("json.py")
        write("taken.py", name="attention")
        with pytest.raises(ConfigError) as caught:
            import_mixers(name)
        assert message in str(caught.value)
        assert not imported()
        assert MIXERS["attention"].cls.__module__ == "aamoe_jax.mixers.attention"

    def test_what_was_imported_elsewhere_is_found_by_its_name_or_its_file(self, write, tmp_path):
        path = write("code/mine.py")
        assert import_again([("mine.py", str(path)), ("lost", "/no/such/lost.py")]) == ["lost"]
        assert "scaled" in MIXERS


class TestRegister:
    @pytest.mark.parametrize("name", ["", "a+b", "a b", "2nd", "even(a, b)"])
    def test_names_are_words(self, name):
        with pytest.raises(ValueError, match="must be letters, digits and underscores"):
            register(name, "nothing")

    def test_configs_are_frozen_dataclasses_with_defaults(self):
        @dataclasses.dataclass(frozen=True)
        class Wanting:
            width: int

        for config in (Wanting, dict, dataclasses.make_dataclass("Loose", [("x", int, 0)])):
            with pytest.raises(ValueError, match="must be a frozen dataclass with"):
                register("scaled", "nothing", config=config)

    def test_a_name_is_taken_once(self):
        with pytest.raises(ValueError, match=r"is that of aamoe_jax\.mixers\.attention\.CausalAttention"):
            register("attention", "another")(Mixer)


class TestOwnConfig:
    """A dataclass that a mixer was registered with."""

    def test_it_is_bound_in_gin_where_the_file_imports_its_module(self, write, tmp_path):
        write("code/mine.py")
        gin = tmp_path / "code" / "run.gin"
        gin.write_text("import mine\nModelConfig.pattern = ('scaled',)\nScaledConfig.gain = 3.0\n")
        config = load_experiment([str(gin)])
        (own,) = config.model.own
        assert (type(own).__name__, own.gain) == ("ScaledConfig", 3.0)
        assert config.model.of(type(own)) is own
        assert "ScaledConfig.gain" in bindable_fields()
        assert differences(load_experiment(), config)["ScaledConfig.gain"] == ("absent", 3.0)

    def test_gin_text_loads_again(self, write, tmp_path):
        write("mine.py")
        import_mixers("mine")
        config = load_experiment([], ["ModelConfig.pattern = ('scaled',)", "ScaledConfig.gain = 3.0"])
        text = operative_gin(config)
        assert text.startswith("import mine\n")
        (tmp_path / "again.gin").write_text(text)
        assert load_experiment([str(tmp_path / "again.gin")]) == config

    def test_wrong_names_and_values_are_refused(self, write):
        write("mine.py")
        import_mixers("mine.py")
        with pytest.raises(ConfigError, match="ScaledConfig has no field 'gian'; did you mean 'gain'"):
            load_experiment([], ["ScaledConfig.gian = 3.0"])
        with pytest.raises(ConfigError, match="expected float"):
            load_experiment([], ["ScaledConfig.gain = 'much'"])

    def test_a_trip_through_json_loses_nothing(self, write):
        write("mine.py")
        import_mixers("mine.py")
        config = load_experiment([], ["ModelConfig.pattern = ('scaled+parallel',)", "ScaledConfig.gain = 3.0"])
        values = json.loads(json.dumps(to_dict(config)))
        assert values["model"]["own"] == {"ScaledConfig": {"gain": 3.0}}
        assert from_dict(ExperimentConfig, values) == config
        with pytest.raises(ConfigError, match="ScaledConfig has no field gian"):
            from_dict(ExperimentConfig, {"model": values["model"] | {"own": {"ScaledConfig": {"gian": 1.0}}}})
        other = to_dict(load_experiment([], ["ModelConfig.pattern = ('scaled+parallel',)"]))
        assert changed_fields(values, other, ExperimentConfig) == {"ScaledConfig.gain": (3.0, 1.0)}

    def test_stacks_without_such_mixers_have_what_is_bound(self, write):
        write("mine.py")
        import_mixers("mine.py")
        assert to_dict(load_experiment([], ["ScaledConfig.gain = 3.0"]))["model"]["own"] == {
            "ScaledConfig": {"gain": 3.0}
        }
        config = load_experiment([], ["ScaledConfig.gain = 1.0"])  # the default
        assert config == ExperimentConfig()
        assert "own" not in to_dict(config)["model"]
