"""Weights in the layout of other programs: bits survive, and a Llama model computes what transformers computes."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.flax
import safetensors.numpy
from tokenizers import Tokenizer, models, pre_tokenizers

from aamoe_jax import evaluate, load_checkpoint, merge
from aamoe_jax.config import ConfigError, DataConfig, to_dict
from aamoe_jax.data import load_tokenizer
from aamoe_jax.data.tokenizers import letters
from aamoe_jax.files import SaveError
from aamoe_jax.model import structure
from aamoe_jax.training.exchange import carried_over, export, llama_config
from aamoe_jax.training.loop import train
from tests.evaluation.helpers import random_params
from tests.launch import session
from tests.launch.helpers import save_run
from tests.training.helpers import experiment, model_config, replace, tiny_data

LLAMA = Path(__file__).parent / "llama"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> DataConfig:
    return tiny_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def exported(data, tmp_path_factory):
    """A run folder, and what launch.export made of it."""
    folder = tmp_path_factory.mktemp("exported")
    save_run(folder / "run", experiment(data, model_config(num_layers=2)))
    arguments = [f"--checkpoint={folder / 'run'}", f"--output={folder / 'out'}"]
    done, again = session.calls("export", [arguments, arguments])
    assert done.code == 0, done.stderr
    assert again.code == 1
    assert "is there already; name a new folder" in again.stderr
    return folder / "run", folder / "out"


class TestExport:
    @pytest.mark.slow
    def test_bits_config_and_evaluation_are_those_of_the_checkpoint(self, exported):
        run, out = map(load_checkpoint, exported)
        jax.tree.map(np.testing.assert_array_equal, run.params, out.params)
        assert (run.config, run.step) == (out.config, out.step)
        of_files = {"fingerprints", "digest"}
        assert out.metadata == {name: value for name, value in run.metadata.items() if name not in of_files}
        assert evaluate(run).nats_per_token == evaluate(out).nats_per_token

    def test_other_programs_can_read_it(self, exported):
        run, (_, folder) = load_checkpoint(exported[0]), exported
        tensors = safetensors.numpy.load_file(folder / "model.safetensors")
        np.testing.assert_array_equal(tensors["embedding"], run.params["embedding"])
        experts = run.params["periods"]["blocks"]["0_aamoe"]["mixer"]["expert_keys"]
        np.testing.assert_array_equal(tensors["periods.blocks.0_aamoe.mixer.expert_keys"], experts)
        card = (folder / "README.md").read_text()
        assert f"| parameters | {sum(value.size for value in tensors.values()):,} |" in card
        assert "| trained on | tiny: 8 steps, " in card
        assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
        assert sorted(path.name for path in folder.parent.iterdir()) == ["out", "run"]  # nothing half-written

    @pytest.mark.slow
    def test_a_run_can_begin_with_it(self, data, exported, tmp_path):
        cold = experiment(data, model_config(num_layers=2), steps=2)
        warm = [replace(cold, "training", init_from=str(folder)) for folder in exported]
        of_run, of_export = (train(each, tmp_path / str(index)) for index, each in enumerate(warm))
        assert of_run.validation_loss == of_export.validation_loss
        assert of_run.validation_loss != train(cold, tmp_path / "cold").validation_loss
        narrow = experiment(data, model_config(num_layers=2, d_model=16), init_from=str(exported[1]))
        with pytest.raises(ConfigError, match=r"init_from = .*: embedding is \(\d+, 32\), and \(\d+, 16\) in this"):
            train(narrow, tmp_path / "narrow")

    def test_a_folder_that_is_damaged_is_refused(self, exported, tmp_path):
        _, out = exported
        shutil.copytree(out, tmp_path / "bad")
        file = tmp_path / "bad" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(ConfigError, match=r"model.safetensors: cannot be read \(.*\); copy the folder again"):
            load_checkpoint(tmp_path / "bad")
        tensors = safetensors.numpy.load_file(out / "model.safetensors")
        tensors["embedding"] = tensors["embedding"][:10]
        safetensors.numpy.save_file(tensors, file)
        with pytest.raises(ConfigError, match=r"bad: embedding is \(10, 32\), and \(\d+, 32\) in this config"):
            load_checkpoint(tmp_path / "bad")

    def test_bfloat16_and_parts_are_read(self, exported, tmp_path):
        """As large models are stored."""
        run, out = exported
        shutil.copytree(out, tmp_path / "parts")
        (tmp_path / "parts" / "model.safetensors").unlink()
        tensors = safetensors.numpy.load_file(out / "model.safetensors")
        halves = {f"{part}.safetensors": list(tensors)[part::2] for part in range(2)}
        for file, names in halves.items():
            rounded = {name: jax.numpy.asarray(tensors[name], jax.numpy.bfloat16) for name in names}
            safetensors.flax.save_file(rounded, tmp_path / "parts" / file)
        index = {"weight_map": {name: file for file, names in halves.items() for name in names}}
        (tmp_path / "parts" / "model.safetensors.index.json").write_text(json.dumps(index))
        wanted = jax.tree.map(
            lambda x: np.asarray(x, ml_dtypes.bfloat16).astype(np.float32), load_checkpoint(run).params
        )
        jax.tree.map(np.testing.assert_array_equal, load_checkpoint(tmp_path / "parts").params, wanted)


class TestLlama:
    """tests/training/llama/golden.py made the folder, with transformers."""

    def test_logits_are_those_of_transformers(self):
        found, golden = load_checkpoint(LLAMA), np.load(LLAMA / "golden.npz")
        assert found.config.model.pattern == ("attention+swiglu",)
        logits, _ = merge(structure(found.config.model), found.params)(jax.numpy.asarray(golden["tokens"]))
        np.testing.assert_allclose(logits, golden["logits"], atol=2e-5)

    def test_one_table_for_both_ends(self, tmp_path):
        shutil.copytree(LLAMA, tmp_path / "tied")
        config = json.loads((LLAMA / "config.json").read_text())
        (tmp_path / "tied" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
        tensors = safetensors.numpy.load_file(LLAMA / "model.safetensors")
        del tensors["lm_head.weight"]
        safetensors.numpy.save_file(tensors, tmp_path / "tied" / "model.safetensors")
        params = load_checkpoint(tmp_path / "tied").params
        np.testing.assert_array_equal(params["readout"], tensors["model.embed_tokens.weight"])
        np.testing.assert_allclose(params["embedding"] * 4.0, params["readout"], rtol=1e-6)  # d = 16

    @pytest.mark.parametrize(
        "change",
        [
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            {"attention_bias": True},
            {"mlp_bias": True},
            {"hidden_act": "gelu"},
            {"head_dim": 8},
            {"quantization_config": {"quant_method": "fp8"}},
        ],
    )
    def test_what_the_stack_has_not_is_refused(self, change):
        found = json.loads((LLAMA / "config.json").read_text()) | change
        (name,) = change
        wanted = "rope_scaling" if name == "rope_parameters" else name
        with pytest.raises(ConfigError, match=f"config.json: {wanted} = .*: attention.swiglu has no such thing"):
            llama_config(found, Path("config.json"))

    def test_its_tokenizer_comes_with_it(self, tmp_path):
        """The table gets a row for padding, for which the tokenizer has no token; what was there stays."""
        shutil.copytree(LLAMA, tmp_path / "llama")
        tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters())}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.add_special_tokens(["<|end_of_text|>"])
        tokenizer.save(str(tmp_path / "llama" / "tokenizer.json"))
        (tmp_path / "llama" / "tokenizer_config.json").write_text('{"eos_token": "<|end_of_text|>"}')
        found, without = load_checkpoint(tmp_path / "llama"), load_checkpoint(LLAMA)
        held = load_tokenizer(found.config.data.tokenizer)
        assert found.config.model.vocab_size == held.vocab_size == 258
        assert found.metadata["datasets"]["llama"]["tokenizer_digest"] == held.digest
        for name in ("embedding", "readout"):
            np.testing.assert_array_equal(found.params[name][:40], without.params[name])
            assert not found.params[name][40:].any()

    def test_a_folder_that_lacks_something_is_refused(self, tmp_path):
        shutil.copytree(LLAMA, tmp_path / "llama")
        tensors = safetensors.numpy.load_file(LLAMA / "model.safetensors")
        for missing in ("model.layers.1.mlp.up_proj.weight", "lm_head.weight"):
            rest = {name: value for name, value in tensors.items() if name != missing}
            safetensors.numpy.save_file(rest, tmp_path / "llama" / "model.safetensors")
            with pytest.raises(ConfigError, match=f"has no tensor '{missing}'"):
                load_checkpoint(tmp_path / "llama")
        bias = {"model.layers.0.self_attn.q_proj.bias": np.zeros(16, np.float32)}
        safetensors.numpy.save_file(tensors | bias, tmp_path / "llama" / "model.safetensors")
        with pytest.raises(ConfigError, match=r"has the tensor 'model.layers.0.self_attn.q_proj.bias', which"):
            load_checkpoint(tmp_path / "llama")
        angles = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2, np.float32)}
        safetensors.numpy.save_file(tensors | angles, tmp_path / "llama" / "model.safetensors")
        load_checkpoint(tmp_path / "llama")
        config = json.loads((LLAMA / "config.json").read_text())
        del config["intermediate_size"]
        (tmp_path / "llama" / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigError, match=r"config.json: has no 'intermediate_size'"):
            load_checkpoint(tmp_path / "llama")

    def test_default_rotary_embeddings_may_be_named(self):
        found = json.loads((LLAMA / "config.json").read_text())
        for scaling in (None, {"rope_type": "default"}, {"type": "default"}):
            assert llama_config(found | {"rope_scaling": scaling}, Path("config.json")).rope_base == 500.0

    def test_other_models_and_no_models_are_refused(self, tmp_path):
        shutil.copytree(LLAMA, tmp_path / "other")
        for text, message in (
            ('{"model_type": "mamba"}', "model_type = 'mamba': only"),
            ("[", "is no JSON object"),
        ):
            (tmp_path / "other" / "config.json").write_text(text)
            with pytest.raises(ConfigError, match=message):
                load_checkpoint(tmp_path / "other")


class TestUpcycling:
    """Of the Llama model: attention becomes AA-MoE, the feed-forward stays."""

    EVERYTHING = (
        "ModelConfig.pattern = ('aamoe+swiglu',)", "AAMoEConfig.num_experts = 0", "AAMoEConfig.bias = 'none'",
        "AAMoEConfig.max_resources = None", "BudgetConfig.beta = 64.0", "chunk_size = 8",
        "ModelConfig.d_model = 16", "ModelConfig.num_heads = 4", "ModelConfig.num_kv_heads = 2",
        "ModelConfig.num_layers = 2", "ModelConfig.d_ff = 24", "ModelConfig.vocab_size = 40",
        "ModelConfig.qk_norm = 'none'", "ModelConfig.rope_base = 500.0", "ModelConfig.norm_eps = 1e-3",
    )  # fmt: skip

    @pytest.mark.slow
    def test_with_no_experts_and_all_chunks_it_is_the_model(self, tmp_path):
        arguments = [f"--checkpoint={LLAMA}", "--gin_file=aamoe.gin", f"--output={tmp_path / 'up'}"]
        (done,) = session.calls("export", [[*arguments, *(f"--gin_param={each}" for each in self.EVERYTHING)]])
        assert done.code == 0, done.stderr
        assert "new parameters, drawn with seed 0: periods.blocks.0_aamoe.mixer.convolution.kernel, " in done.stdout
        found, golden = load_checkpoint(tmp_path / "up"), np.load(LLAMA / "golden.npz")
        assert found.config.model.pattern == ("aamoe+swiglu",)
        logits, _ = merge(structure(found.config.model), found.params)(jax.numpy.asarray(golden["tokens"]))
        np.testing.assert_allclose(logits, golden["logits"], atol=2e-5)

    @pytest.mark.slow
    def test_with_experts_and_a_budget_it_trains_on(self, data, tmp_path):
        dense = experiment(data, model_config("attention+swiglu", num_layers=2), steps=4)
        train(dense, tmp_path / "dense")
        checkpoint = load_checkpoint(tmp_path / "dense")
        model = model_config("aamoe+swiglu", num_layers=2)
        params, new = carried_over(checkpoint.params, dense.model, model, seed=0)
        assert "periods.blocks.0_aamoe.mixer.expert_keys" in new
        assert not any("qkv" in name or "swiglu" in name or "norm" in name for name in new)
        export(
            params,
            checkpoint.metadata | {"config": to_dict(dataclasses.replace(dense, model=model))},
            "",
            tmp_path / "up",
        )
        warm = experiment(data, model, steps=2, init_from=str(tmp_path / "up"))
        cold = replace(warm, "training", init_from=None)
        losses = [train(each, tmp_path / name).validation_loss for each, name in ((warm, "warm"), (cold, "cold"))]
        assert losses[0] < losses[1]

    def test_what_cannot_be_carried_over_is_refused(self):
        source = load_checkpoint(LLAMA)
        for change, message in (
            ({"rope_base": 1e4}, "ModelConfig.rope_base = 10000.0: the checkpoint's is 500.0"),
            ({"num_heads": 2, "num_kv_heads": 2}, "ModelConfig.num_heads = 2: the checkpoint's is 4"),
            ({"pattern": ("mlp",)}, r"ModelConfig.pattern = .*: nothing of the checkpoint's"),
        ):
            target = dataclasses.replace(source.config.model, **change)
            with pytest.raises(ConfigError, match=message):
                carried_over(source.params, source.config.model, target, seed=0)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SaveError, match=r"out: cannot be written \(.*\); name another folder"):
        export({"embedding": np.zeros(2)}, {"step": 0}, "card", tmp_path / "file" / "out")


def test_a_card_of_a_model_that_was_not_evaluated(tmp_path):
    export(random_params(model_config(num_layers=1)), {"step": 0}, "card", tmp_path / "new" / "out")
    assert (tmp_path / "new" / "out" / "README.md").read_text() == "card"
