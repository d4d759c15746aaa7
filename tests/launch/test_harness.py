"""lm-evaluation-harness on checkpoints, without network: what it finds is what the programs here find."""

import dataclasses
import importlib.util
import json
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from aamoe_jax import Checkpoint, ConfigError, Decoder, Sampling, evaluate, generate, stream
from aamoe_jax.data import ByteTokenizer
from experiments.ruler import TASKS
from launch import harness
from tests.data.helpers import prepared
from tests.evaluation.helpers import random_params
from tests.launch import session
from tests.launch.helpers import save_run
from tests.training.helpers import SEQ_LEN, experiment, model_config, tiny_data

INSTALLED = importlib.util.find_spec("lm_eval") is not None
needs_lm_eval = pytest.mark.skipif(
    not INSTALLED, reason="lm-eval is not installed, which takes 320 MB: pip install -c constraints.txt -e '.[harness]'"
)
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
UNIFORM = float(np.log(ByteTokenizer.vocab_size))
"""What the first token of a text costs."""


def text(generator: random.Random, size: int) -> str:
    return "".join(generator.choices("abcdefgh", k=size))


def write_task(folder: Path, name: str, rows: list[dict], **settings) -> Path:
    """A task of these rows, as lm-eval defines them."""
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}}}
    task = {"task": name, **data, "test_split": "test", "target_delimiter": "", **settings}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(task))
    return path


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"lm-eval is not installed: pip install .*harness"):
        harness.main(["harness"])


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The folder, the items, and what the programs said of them."""
    folder = tmp_path_factory.mktemp("harness")
    save_run(folder / "run", experiment(tiny_data(folder / "data"), model_config(num_layers=1)))
    generator = random.Random(0)
    sizes = [5, 20, 40, 90, *(generator.randint(1, 100) for _ in range(16))]  # rows of 64: some are cut
    items = [
        {
            "context": text(generator, size),
            "choices": [" " + text(generator, generator.randint(1, 12)) for _ in range(generator.randint(2, 4))],
            "answer": 0,
        }
        for size in sizes
    ]
    (folder / "tasks").mkdir()
    multiple = {"doc_to_text": "{{context}}", "doc_to_choice": "choices", "doc_to_target": "answer"}
    write_task(folder / "tasks", "items", items, output_type="multiple_choice", **multiple)
    until = {"generation_kwargs": {"until": ["\n\n\n"], "max_gen_toks": 12, "do_sample": False}}
    prompts = [{"prompt": "abc", "target": "x"}, {"prompt": text(generator, 30), "target": "x"}]
    write = {"doc_to_text": "prompt", "doc_to_target": "target", "output_type": "generate_until", **until}
    write_task(folder / "tasks", "texts", prompts, **write)
    (folder / "empty").mkdir()
    write_task(folder / "tasks", "lost", [], **write).with_suffix(".jsonl").unlink()
    hub = write_task(folder / "tasks", "hub", [], **write)
    hub.write_text(yaml.safe_dump(yaml.safe_load(hub.read_text()) | {"dataset_path": "someone/rows"}))
    unread = [(folder / "tasks" / f"{name}.yaml").rename(folder / f"{name}.yaml") for name in ("lost", "hub")]
    checkpoint, found = f"--checkpoint={folder / 'run'}", f"--output={folder / 'harness.json'}"
    data = folder / "tasks" / "items.jsonl"
    calls = [
        ("choose", [checkpoint, f"--items={data}", f"--output={folder / 'choose.json'}"]),
        *(("generate", [checkpoint, "--temperature=0", "--tokens=12", f"--prompt={one['prompt']}"]) for one in prompts),
        ("harness", [checkpoint, f"--tasks={folder / 'tasks'}", "--batch_size=3", found]),
        ("harness", [checkpoint, f"--tasks={folder / 'tasks' / 'items.yaml'}", "--limit=2"]),
        ("harness", [checkpoint, f"--tasks={folder / 'none.yaml'}"]),
        ("harness", [checkpoint, f"--tasks={folder / 'empty'}"]),
        ("harness", [checkpoint, f"--tasks={data}"]),
        *(("harness", [checkpoint, f"--tasks={path}"]) for path in unread),
    ]
    return folder, items, prompts, session.calls_of(calls, HF_HOME=str(folder / "cache"), **OFFLINE)


@needs_lm_eval
class TestPrograms:
    def test_choices_have_the_probabilities_of_launch_choose(self, outcomes):
        folder, items, _, (chosen, *_) = outcomes
        assert chosen.code == 0, chosen.stderr
        ours, theirs = (json.loads((folder / f"{name}.json").read_text()) for name in ("choose", "harness"))
        assert theirs["step"] == ours["step"]
        assert 0 < ours["accuracy"] < 1
        assert theirs["results"]["items"]["acc,none"] == pytest.approx(ours["accuracy"])
        assert theirs["results"]["items"]["acc_norm,none"] == pytest.approx(ours["accuracy_per_byte"])
        samples = sorted(theirs["samples"]["items"], key=lambda sample: sample["doc_id"])
        assert len(samples) == len(items)
        for sample, log_p in zip(samples, ours["log_probabilities"], strict=True):
            assert [float(one) for one, _ in sample["filtered_resps"]] == pytest.approx(log_p, abs=1e-4)

    def test_texts_are_those_of_launch_generate(self, outcomes):
        folder, _, prompts, (_, *generated) = outcomes
        samples = json.loads((folder / "harness.json").read_text())["samples"]["texts"]
        for prompt, sample, outcome in zip(prompts, samples, generated[: len(prompts)], strict=True):
            assert outcome.stdout == prompt["prompt"] + sample["resps"][0][0] + "\n"

    def test_one_file_and_what_is_no_task(self, outcomes):
        folder, _, _, (*_, whole, limited, missing, empty, data, lost, hub) = outcomes
        assert whole.code == limited.code == 0, limited.stderr
        assert "|items" in whole.stdout
        assert "|texts" in whole.stdout
        assert "|texts" not in limited.stdout
        expected = ("there is no such file or folder", "holds no yaml file of a task", "a yaml file names the jsonl")
        for outcome, message in zip((missing, empty, data), expected, strict=True):
            assert outcome.code == 1
            assert f"error: --tasks={folder}" in outcome.stderr
            assert message in outcome.stderr
        for outcome in (lost, hub):
            assert outcome.code == 1
            assert re.search(
                r"^error: --tasks=\S+: the rows of a task cannot be read: .*no network$", outcome.stderr, re.M
            )
            assert "Traceback" not in outcome.stderr


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:
    """A model that was never trained, and a test split whose documents are a row each."""
    generator = random.Random(1)
    documents = {
        split: [(f"{split}/{i}", text(generator, SEQ_LEN - 1).encode()) for i in range(4)]
        for split in ("train", "validation", "test")
    }
    data = prepared(tmp_path_factory.mktemp("data"), documents, seq_len=SEQ_LEN)
    config = experiment(data, model_config(num_layers=1))
    return Checkpoint(config, random_params(config.model), 0, {})


def asked(*arguments: tuple) -> list:
    from lm_eval.api.instance import Instance

    return [Instance("generate_until", {}, one, 0) for one in arguments]


@pytest.fixture(scope="module")
def model(checkpoint):
    from aamoe_jax.harness import HarnessModel

    return HarnessModel(checkpoint, batch_size=2)


@needs_lm_eval
class TestModel:
    def test_whole_texts_cost_what_launch_evaluate_counts(self, checkpoint, model):
        from aamoe_jax.data import documents_of

        texts = [one.decode() for one in documents_of(checkpoint.config.data, "tiny", "test")]
        found = model.loglikelihood_rolling(asked(*((one,) for one in texts)))
        by_target = evaluate(checkpoint).nll_by_target
        assert by_target.shape[1] == SEQ_LEN
        # A row is a text, of which the first token is no target, and the end of the document.
        expected = -by_target[: len(texts), : SEQ_LEN - 2].sum(1) - UNIFORM
        assert found == pytest.approx(expected.tolist(), abs=1e-3)

    def test_a_text_longer_than_a_row_is_cut_into_windows(self, model):
        whole, most = text(random.Random(2), 100), SEQ_LEN - 1
        (found,) = model.loglikelihood_rolling(asked((whole,)))
        # The second window is full: what it does not score is context.
        parts = [("", whole[:most]), (whole[100 - SEQ_LEN : most], whole[most:])]
        assert found == pytest.approx(sum(log_p for log_p, _ in model.loglikelihood(asked(*parts))), abs=1e-4)

    def test_without_context_the_first_token_is_anything(self, model):
        (alone, greedy), (after, _) = model.loglikelihood(asked(("", "abcd"), ("a", "bcd")))
        assert alone == pytest.approx(after - UNIFORM, abs=1e-5)
        assert not greedy
        assert model.loglikelihood_rolling(asked(("a",), ("",))) == pytest.approx([-UNIFORM, 0])

    def test_greedy_is_what_greedy_decoding_gives(self, checkpoint, model):
        from aamoe_jax.harness import NO_CONTEXT

        prompt = ByteTokenizer().encode(b"abc").astype(np.int32)
        decoder = Decoder(checkpoint.config.model, checkpoint.params, length=SEQ_LEN)
        greedy = Sampling(temperature=0.0, vocab_size=ByteTokenizer.vocab_size)
        tokens = [one for (one,) in stream(decoder, [prompt], new_tokens=5, sampling=greedy)]
        other = [*tokens[:2], (tokens[2] + 1) % 256, *tokens[3:]]
        found = model._loglikelihood_tokens([(("", ""), prompt.tolist(), one) for one in (tokens, other)])
        assert [is_greedy for _, is_greedy in found] == [True, False]
        # Nothing says that the first token of a text is the most probable one.
        first = prompt[:1]
        tokens = [one for (one,) in stream(decoder, [first], new_tokens=5, sampling=greedy)]
        (_, alone), (_, after) = model._loglikelihood_tokens(
            [(("", ""), [NO_CONTEXT], [*first.tolist(), *tokens]), (("", ""), first.tolist(), tokens)]
        )
        assert (alone, after) == (False, True)

    def test_texts_are_greedy_and_end_before_a_stop(self, checkpoint, model):
        prompts = ["abc", "hgfedcba" * 3, "b"]
        whole = [
            generate(checkpoint, one, new_tokens=20, sampling=Sampling(temperature=0.0), cache_length=SEQ_LEN)
            for one in prompts
        ]
        kwargs = {"until": [], "max_gen_toks": 20}
        assert model.generate_until(asked(*((one, kwargs) for one in prompts))) == whole
        stops = [next(letter for letter in one[2:] if letter != "\ufffd") for one in whole]
        stopped = model.generate_until(
            asked(*((one, kwargs | {"until": [stop, "never"]}) for one, stop in zip(prompts, stops, strict=True)))
        )
        assert stopped == [one[: one.index(stop)] for one, stop in zip(whole, stops, strict=True)]

    def test_of_a_long_prompt_the_end_is_read(self, model):
        kwargs, prompt = {"max_gen_toks": 10}, text(random.Random(3), 200)
        cut, whole = model.generate_until(asked((prompt[-(SEQ_LEN - 10) :], kwargs), (prompt, kwargs)))
        assert cut == whole

    def test_draws_are_drawn(self, model):
        kwargs = {"max_gen_toks": 20, "temperature": 5.0}
        greedy, cold = model.generate_until(asked(("abc", {"max_gen_toks": 20}), ("abc", kwargs)))
        assert greedy == cold  # lm-eval asks for draws by do_sample
        (drawn,) = model.generate_until(asked(("abc", kwargs | {"do_sample": True})))
        assert drawn != greedy

    def test_what_cannot_be_done_is_refused(self, checkpoint, model):
        from aamoe_jax.harness import HarnessModel

        with pytest.raises(ConfigError, match=r"continuation 'b+': 64 tokens do not fit into a row of 64 .*max_length"):
            model.loglikelihood(asked(("a", "b" * 64)))
        with pytest.raises(ConfigError, match=r"generation_kwargs.num_beams: not known; there are do_sample"):
            model.generate_until(asked(("a", {"num_beams": 2})))
        with pytest.raises(ConfigError, match="max_gen_toks = 64: a row of 64 has no room"):
            model.generate_until(asked(("a", {"max_gen_toks": 64})))
        with pytest.raises(ConfigError, match="model_args size: not known"):
            HarnessModel(checkpoint, size=3)

    def test_it_is_registered_and_takes_longer_rows(self, checkpoint, tmp_path):
        from lm_eval.api.registry import get_model

        import aamoe_jax.harness

        save_run(tmp_path / "run", dataclasses.replace(checkpoint.config))
        loaded = get_model("aamoe").create_from_arg_string(
            f"checkpoint={tmp_path / 'run'},max_length=128", {"batch_size": 1, "device": None}
        )
        assert isinstance(loaded, aamoe_jax.harness.HarnessModel)
        ((log_p, _),) = loaded.loglikelihood(asked(("a", "b" * 100)))
        assert np.isfinite(log_p)


@needs_lm_eval
class TestRuler:
    def test_generated_tasks_are_loaded_and_scored(self, tmp_path):
        save_run(tmp_path / "run", experiment(tiny_data(tmp_path / "data"), model_config(num_layers=1)))
        written, done = session.calls_of(
            [
                ("experiments.ruler", ["--length=256", "--rows=2", f"--output={tmp_path / 'ruler'}"]),
                (
                    "harness",
                    [
                        f"--checkpoint={tmp_path / 'run'}",
                        f"--tasks={tmp_path / 'ruler'}",
                        "--max_length=256",
                        f"--output={tmp_path / 'found.json'}",
                    ],
                ),
            ],
            HF_HOME=str(tmp_path / "cache"),
            **OFFLINE,
        )
        assert written.code == done.code == 0, done.stderr
        found = json.loads((tmp_path / "found.json").read_text())
        assert set(found["results"]) == {f"ruler_{task}" for task in TASKS}
        for task, samples in found["samples"].items():
            rows = (tmp_path / "ruler" / f"{task.removeprefix('ruler_')}.jsonl").read_text().splitlines()
            prompts = {sample["arguments"][0][0] for sample in samples}
            assert prompts == {json.loads(row)["prompt"] for row in rows}
            assert found["results"][task]["found,none"] == np.mean([sample["found"] for sample in samples])

    def test_the_score_is_the_share_of_answers_found(self):
        from aamoe_jax.harness import share_found

        row = {"answers": ["12345", "67890", "abc", "x"]}
        assert share_found(row, [" 67890 and abc."]) == {"found": 0.5}
        assert share_found(row, ["12345 67890 abc x"]) == {"found": 1.0}
        assert share_found(row, [""]) == {"found": 0.0}
