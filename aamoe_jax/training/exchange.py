"""Weights as other programs hold them: folders with a config.json and a model.safetensors, in Hugging Face's layout.

A folder of `export` has a checkpoint's parameters under their own names. A folder of a Llama model is read as a stack
of `attention+swiglu`. `load_checkpoint` and `TrainingConfig.init_from` take both.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import jax
import numpy as np
import safetensors.flax
import safetensors.numpy
from flax import nnx, traverse_util
from jaxtyping import Float

from aamoe_jax.bucket import AnyPath
from aamoe_jax.config import ConfigError, DataConfig, ExperimentConfig, ModelConfig, from_dict, to_dict
from aamoe_jax.data import load_tokenizer
from aamoe_jax.files import SaveError
from aamoe_jax.model import LanguageModel, split

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MODEL_TYPE = "aamoe"
OF_FILES = ("fingerprints", "digest")
Params = dict[str, Any]
Meta = dict[str, Any]
MEANING = ("norm", "norm_eps", "qk_norm", "rope_base", "embedding")
"""Fields of ModelConfig that change what parameters compute, and not their shapes."""
LLAMA_LAYER = {
    "input_layernorm": "0_attention.norm.scale",
    "self_attn.q_proj": "0_attention.mixer.parts.attention.qkv.query.kernel",
    "self_attn.k_proj": "0_attention.mixer.parts.attention.qkv.key.kernel",
    "self_attn.v_proj": "0_attention.mixer.parts.attention.qkv.value.kernel",
    "self_attn.o_proj": "0_attention.mixer.parts.attention.output.kernel",
    "post_attention_layernorm": "1_swiglu.norm.scale",
    "mlp.gate_proj": "1_swiglu.mixer.parts.feed_forward.gate.kernel",
    "mlp.up_proj": "1_swiglu.mixer.parts.feed_forward.key.kernel",
    "mlp.down_proj": "1_swiglu.mixer.parts.feed_forward.value.kernel",
}
"""Names in a layer of Llama's, and in a block here. Matrices are the transposes of each other."""


def is_exported(path: AnyPath) -> TypeGuard[Path]:
    """Whether a folder of this machine holds weights in this layout."""
    return (
        isinstance(path, Path)
        and (path / CONFIG).is_file()
        and ((path / WEIGHTS).is_file() or (path / INDEX).is_file())
    )


def export(params: Params, meta: Meta, card: str, folder: Path, more: Callable[[Path], object] | None = None) -> None:
    """Writes a checkpoint as model.safetensors, config.json and README.md.

    Args:
      meta: of the checkpoint; it goes into config.json, without what belongs to the files of the checkpoint.
      card: the text of README.md.
      more: writes what else belongs into the folder, which appears when all of it is there.

    Raises:
      ConfigError: the folder is there already.
      SaveError: it cannot be written.
    """
    if folder.exists():
        raise ConfigError(f"{folder}: is there already; name a new folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _export(params, meta, card, folder, more)
    except (OSError, safetensors.SafetensorError) as error:
        raise SaveError(f"{folder}: cannot be written ({error}); name another folder") from error


def _export(params: Params, meta: Meta, card: str, folder: Path, more: Callable[[Path], object] | None) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as work:
        written = Path(work, folder.name)
        written.mkdir()
        flat = traverse_util.flatten_dict(jax.tree.map(np.asarray, params), sep=".")
        safetensors.numpy.save_file(flat, written / WEIGHTS, {"format": "np"})
        told = {"model_type": MODEL_TYPE} | {name: value for name, value in meta.items() if name not in OF_FILES}
        (written / CONFIG).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        (written / "README.md").write_text(card, encoding="utf-8")
        if more is not None:
            more(written)
        written.rename(folder)


def read_meta(folder: Path) -> Meta:
    """The metadata of a folder, as a checkpoint has it: of a Llama model its config alone.

    Raises:
      ConfigError: it is of a model that is not known here, or of a Llama model with something that is not.
    """
    found = _read_json(folder / CONFIG)
    kind = found.get("model_type")
    if kind == MODEL_TYPE:
        return {name: value for name, value in found.items() if name != "model_type"}
    if kind != "llama":
        raise ConfigError(f"{folder / CONFIG}: model_type = {kind!r}: only {MODEL_TYPE!r} and 'llama' can be read")
    try:
        model, datasets = llama_config(found, folder / CONFIG), dict[str, Any]()
    except KeyError as error:
        raise ConfigError(f"{folder / CONFIG}: has no {error}, which the config of a Llama model has") from error
    data = DataConfig(seq_len=min(int(found.get("max_position_embeddings", DataConfig.seq_len)), DataConfig.seq_len))
    if (folder / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
        data = DataConfig(seq_len=data.seq_len, tokenizer=str(folder / "tokenizer.json"))
        datasets = {"llama": {"tokenizer_digest": tokenizer.digest}}
        # Llama's tokenizers may have no token for padding: it comes after all others.
        model = dataclasses.replace(model, vocab_size=max(model.vocab_size, tokenizer.vocab_size))
    config = ExperimentConfig(model=model, data=data)
    return {"config": to_dict(config), "step": 0, "datasets": datasets}


def read_params(folder: Path, meta: Meta, like: Params | None) -> Params:
    """The parameters of a folder, with the shardings of `like`; without, on one device. Every process reads all of it.

    Raises:
      ConfigError: a file is damaged or missing; or names or shapes are not those of the config, or of `like`.
    """
    tensors, config = _tensors(folder), from_dict(ModelConfig, meta["config"]["model"])
    if _read_json(folder / CONFIG)["model_type"] == "llama":
        try:
            flat = _from_llama(tensors, config, folder)
        except KeyError as error:
            raise ConfigError(f"{folder}: has no tensor {error}, which a Llama model of its config has") from error
    else:
        flat = dict(tensors)
    params = traverse_util.unflatten_dict({tuple(name.split(".")): value for name, value in flat.items()})
    of_config = jax.eval_shape(lambda: split(LanguageModel(config, rngs=nnx.Rngs(0)))[1])
    there, wanted = _shapes(params), _shapes(like or of_config)
    if there != wanted:
        name = next(iter(sorted(there.items() ^ wanted.items())))[0]
        raise ConfigError(
            f"{folder}: {name} is {there.get(name, 'missing')}, and {wanted.get(name, 'not there')} in this config"
        )
    if like is None:
        return jax.tree.map(jax.numpy.asarray, params)
    return jax.tree.map(lambda value, leaf: jax.device_put(value.astype(leaf.dtype), leaf.sharding), params, like)


def carried_over(params: Params, source: ModelConfig, target: ModelConfig, *, seed: int) -> tuple[Params, list[str]]:
    """The parameters of another stack with those of a checkpoint wherever it has the same ("upcycling").

    An AA-MoE layer takes the norm and the projections of an attention in its place. With experts it has more to read,
    and without any, where every chunk is affordable and there is no bias, it is that attention.

    Args:
      source, target: the checkpoint's stack, and the other.
      seed: of what the other has and the checkpoint has not.

    Returns:
      The parameters, and the names of those that are new.

    Raises:
      ConfigError: the stacks differ in what parameters mean, or have no block in common.
    """
    for name in ("d_model", "num_heads", "kv_heads", "num_layers", "vocab_size", *MEANING):
        if (was := getattr(source, name)) != (now := getattr(target, name)):
            raise ConfigError(f"ModelConfig.{name} = {now!r}: the checkpoint's is {was!r}, and its parameters need it")
    flat = traverse_util.flatten_dict(split(LanguageModel(target, rngs=nnx.Rngs(seed)))[1], sep=".")
    held = traverse_util.flatten_dict(params, sep=".")
    for name in list(held):
        if match := re.fullmatch(r"(periods\.blocks\.\d+)_attention\.(?:mixer\.parts\.attention|(norm))\.(.+)", name):
            block, norm, rest = match.groups()
            held[f"{block}_aamoe.{norm or 'mixer'}.{rest}"] = held[name]
    found = {name: held[name] for name, leaf in flat.items() if name in held and held[name].shape == leaf.shape}
    if not any(name.startswith("periods.") for name in found):
        raise ConfigError(
            f"ModelConfig.pattern = {target.pattern}: nothing of the checkpoint's {source.pattern} is in it"
        )
    return traverse_util.unflatten_dict(flat | found, sep="."), sorted(flat.keys() - found.keys())


def llama_config(found: Mapping[str, Any], path: Path) -> ModelConfig:
    """The stack that computes what a Llama config describes.

    Raises:
      ConfigError: it asks for something that this stack has not.
    """
    rotary = found.get("rope_parameters") or {}
    scaling = found.get("rope_scaling") or rotary
    head_dim = found.get("head_dim") or found["hidden_size"] // found["num_attention_heads"]
    unknown = {
        "rope_scaling": scaling.get("rope_type", scaling.get("type", "default")) != "default",
        "quantization_config": "quantization_config" in found,
        "attention_bias": bool(found.get("attention_bias")),
        "mlp_bias": bool(found.get("mlp_bias")),
        "hidden_act": found.get("hidden_act", "silu") != "silu",
        "head_dim": head_dim * found["num_attention_heads"] != found["hidden_size"],
    }
    for name, is_there in unknown.items():
        if is_there:
            raise ConfigError(f"{path}: {name} = {found.get(name)!r}: attention+swiglu has no such thing")
    return ModelConfig(
        vocab_size=found["vocab_size"],
        d_model=found["hidden_size"],
        num_heads=found["num_attention_heads"],
        num_kv_heads=found.get("num_key_value_heads"),
        num_layers=found["num_hidden_layers"],
        pattern=("attention+swiglu",),
        d_ff=found["intermediate_size"],
        norm_eps=found["rms_norm_eps"],
        qk_norm="none",
        rope_base=found.get("rope_theta") or rotary.get("rope_theta", 10_000.0),
    )


def _from_llama(tensors: dict[str, np.ndarray], config: ModelConfig, folder: Path) -> dict[str, np.ndarray]:
    """Llama's tensors under the names of `attention+swiglu`. One table for both ends becomes two: what enters here is
    sqrt(d) times the table, and what leaves is not.

    Raises:
      KeyError: one is missing.
      ConfigError: there is one more.
    """
    embedding = tensors.pop("model.embed_tokens.weight")
    tied = _read_json(folder / CONFIG).get("tie_word_embeddings", False)
    readout = tensors.pop("lm_head.weight", embedding) if tied else tensors.pop("lm_head.weight")
    more = ((0, config.vocab_size - len(embedding)), (0, 0))
    flat = {
        "embedding": np.pad(embedding / np.float32(config.d_model**0.5), more),
        "readout": np.pad(embedding if tied else readout, more),
        "norm.scale": tensors.pop("model.norm.weight"),
    }
    for theirs, ours in LLAMA_LAYER.items():
        of_layers = [tensors.pop(f"model.layers.{layer}.{theirs}.weight") for layer in range(config.num_layers)]
        flat[f"periods.blocks.{ours}"] = np.stack([value.T if value.ndim == 2 else value for value in of_layers])
    for name in tensors:
        if not name.endswith("rotary_emb.inv_freq"):  # older files have the angles, which follow from the config
            raise ConfigError(f"{folder}: has the tensor {name!r}, which a Llama model of its config has not")
    return flat


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: is no JSON object ({error})") from error


def _tensors(folder: Path) -> dict[str, Float[np.ndarray, "..."]]:
    """All tensors of a folder in float32, whose file may be in parts."""
    files = [WEIGHTS]
    if not (folder / WEIGHTS).is_file():
        files = sorted(set(_read_json(folder / INDEX).get("weight_map", {}).values()))
    found: dict[str, np.ndarray] = {}
    for name in files:
        try:
            held = safetensors.flax.load_file(folder / name)  # of NumPy's types none is bfloat16
        except (OSError, safetensors.SafetensorError) as error:
            raise ConfigError(f"{folder / name}: cannot be read ({error}); copy the folder again") from error
        except AttributeError as error:  # a type that NumPy has not
            raise ConfigError(f"{folder / name}: has numbers of a type that is not known here ({error})") from error
        found |= {key: np.asarray(value, np.float32) for key, value in held.items()}
    return found


def _shapes(tree: Params) -> dict[str, tuple[int, ...]]:
    return {".".join(path): tuple(leaf.shape) for path, leaf in traverse_util.flatten_dict(tree).items()}
