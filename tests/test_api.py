"""What `import aamoe_jax` offers: the example and the page on it run, and every public name is documented."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import aamoe_jax
from aamoe_jax import ConfigError, config, data, evaluate
from experiments.binding import differences
from tests.data.helpers import memory_corpus, random_documents

ROOT = Path(__file__).parents[1]
EXAMPLE = (ROOT / "examples/train_in_python.py").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), flags=re.DOTALL)
STEPS = 3


def test_the_page_shows_the_example():
    assert EXAMPLE.endswith(f'"""\n\n{BLOCKS[0]}')
    assert len(BLOCKS) == 2


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> dict[str, Any]:
    """The variables of the example after a few steps on a small dataset."""
    folder = tmp_path_factory.mktemp("example")
    documents = random_documents(train=60, held_out=12)
    bytes_of = data.ByteTokenizer()
    data.prepare(memory_corpus(documents, "code"), data_dir=f"{folder}/data", tokenizer=bytes_of, document_align=64)
    assert "steps=200" in EXAMPLE
    variables: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(compile(EXAMPLE.replace("steps=200", f"steps={STEPS}"), "train_in_python.py", "exec"), variables)
        yield variables


@pytest.mark.slow
def test_the_example_trains_evaluates_and_generates(ran):
    assert (ran["result"].step, ran["result"].interrupted) == (STEPS, None)
    assert ran["checkpoint"].step == STEPS
    assert ran["checkpoint"].config == ran["config"]
    evaluation = ran["evaluation"]
    assert evaluation.budget == "prefix"
    assert evaluation.causality.largest == 0
    assert 0 < evaluation.spent <= 4


def test_the_variant_on_the_page_differs_from_the_experiment(ran):
    exec(BLOCKS[1], ran)
    assert differences(ran["config"], ran["wider"]) == {"ModelConfig.d_model": (64, 128)}


def test_validation_in_training_and_evaluation_of_its_checkpoint_agree(ran):
    found = evaluate(ran["checkpoint"], split="validation")
    assert found.nats_per_token == pytest.approx(ran["result"].validation_loss, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "train"}, "split = 'train': must be one of validation, test"),
        ({"budget": "predictor"}, "budget = 'predictor': this model was not trained for that; it has row, prefix"),
        ({"budget_scale": 0.0}, "budget_scale = 0.0: must be a positive number"),
        ({"dataset": "nothing"}, "dataset 'nothing' is not prepared in DataConfig.data_dir = 'data'"),
    ],
)
def test_evaluate_refuses_what_it_cannot_do(ran, arguments, message):
    unchecked = inspect.unwrap(evaluate)  # the type checker of the tests would refuse the wrong literals first
    with pytest.raises(ConfigError, match=re.escape(message)):
        unchecked(ran["checkpoint"], **arguments)


def test_evaluate_asks_which_of_several_datasets(ran):
    experiment = ran["config"]
    several = dataclasses.replace(experiment.data, mixture=(("code", 1.0), ("books", 1.0)))
    checkpoint = ran["checkpoint"]._replace(config=dataclasses.replace(experiment, data=several))
    with pytest.raises(ConfigError, match="was trained on several; give one of code, books"):
        evaluate(checkpoint)


def test_every_public_name_has_a_docstring_of_its_own():
    for name in sorted(set(aamoe_jax.__all__) - {"__version__"}):
        doc = vars(aamoe_jax)[name].__doc__
        assert doc, name
        assert not doc.startswith(f"{name}("), f"{name} has only the docstring that dataclass generates"


def test_every_config_class_is_public():
    classes = {name for name, found in vars(config).items() if inspect.isclass(found) and name.endswith("Config")}
    assert classes
    assert classes <= set(aamoe_jax.__all__)


def test_the_version_is_that_of_the_installed_package():
    assert aamoe_jax.__version__ == importlib.metadata.version("aamoe_jax")
