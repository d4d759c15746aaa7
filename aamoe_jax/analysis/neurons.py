"""A trained layer read as networks of neurons: patterns that inputs are compared with, messages that are added up.

A feed-forward is a static network, a head one to which every token adds a neuron (McCormick, Patterns and Messages,
part 4; PM-01). Both are here in one format, with experts and persistent vectors. Names are the essay's (PM-16): x_q,
x_k, x_v are the normed input of the layer in its three roles; p_i = x_k W^P_i and m_i = x_v W^M_i are what head i makes
of it; P_i and M_i hold all of them; o_i = softmax(x_q P_i^T / sqrt(d_h)) M_i.

All in NumPy and float64, from parameters as `aamoe_jax.model.split` gives them.

Shapes: N networks side by side (heads; experts of a mixture), n neurons in each, d width, H heads, k = d_h = d / H.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from aamoe_jax.config import ConfigError, ModelConfig
from aamoe_jax.cost import parameter_count
from aamoe_jax.mixers.build import build_mixer
from aamoe_jax.registry import MIXERS, Activation

Params = Mapping[str, Any]


class Neurons(NamedTuple):
    """Networks side by side; what the layer adds to the residual stream is the sum of their outputs (PM-06)."""

    P: Float[np.ndarray, "N n d"]
    """Patterns: input weights."""
    M: Float[np.ndarray, "N n d"]
    """Messages: output weights."""
    activation: Activation
    scale: float = 1.0
    """Of the products x_q P^T: 1 / sqrt(d_h) in a head."""
    gates: Float[np.ndarray, "N n d"] | None = None
    """Input weights of the gates."""
    query_map: Float[np.ndarray, "N d k"] | None = None
    """W^Q where queries are normed: products are divided by the root mean square of x_q W^Q, one number per head."""

    def grow(self, p: Float[np.ndarray, "N d"], m: Float[np.ndarray, "N d"]) -> Neurons:
        """With one more neuron in each network: P <- Concat(P, p), M <- Concat(M, m) (PM-04).

        Raises:
          ValueError: neurons have gates, and this one has none.
        """
        if self.gates is not None:
            raise ValueError(f"{self.activation} neurons have gates: lay them out with `as_neurons`")
        return self._replace(
            P=np.concatenate([self.P, p[:, None]], axis=1), M=np.concatenate([self.M, m[:, None]], axis=1)
        )

    def activations(self, x_q: Float[np.ndarray, "d"]) -> Float[np.ndarray, "N n"]:
        """alpha: what every neuron's message is multiplied by."""
        scores, count = self._products(self.P, x_q), self.P.shape[1]
        match self.activation:
            case "softmax":
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                return weights / weights.sum(-1, keepdims=True)
            case "relu":
                return np.maximum(scores, 0)
            case "swiglu":
                return silu(self._products(self.gates, x_q)) * scores
            case "root":
                return scores / count**0.5
            case "gated_root":
                return silu(self._products(self.gates, x_q)) * scores / count**0.5

    def evaluate(self, x_q: Float[np.ndarray, "d"]) -> Float[np.ndarray, "N d"]:
        """o = alpha M, of every network (PM-05)."""
        return np.einsum("Nn,Nnd->Nd", self.activations(x_q), self.M)

    def _products(self, weights: Any, x_q: Float[np.ndarray, "d"]) -> Float[np.ndarray, "N n"]:
        products = self.scale * weights @ x_q
        if self.query_map is None:
            return products
        return products / root_mean_square(np.einsum("d,Ndk->Nk", x_q, self.query_map))


class Heads(NamedTuple):
    """The projections of attention, head by head; groups of heads that have keys and values in common have the same
    W_K and W_V (PM-09). With norms, their scales."""

    W_Q: Float[np.ndarray, "H d k"]
    W_K: Float[np.ndarray, "H d k"]
    W_V: Float[np.ndarray, "H d k"]
    W_O: Float[np.ndarray, "H k d"]
    query_scale: Float[np.ndarray, "k"] | None
    key_scale: Float[np.ndarray, "k"] | None
    rope_base: float

    @property
    def W_P(self) -> Float[np.ndarray, "H d d"]:
        """W^P_i = W^K_i W^Q_i^T, so that x_q p^T = q k^T where tokens are not turned to positions (PM-03).

        Raises:
          ValueError: keys are normed: a pattern is then no linear map of its token (`pattern` has it).
        """
        if self.key_scale is not None:
            raise ValueError("qk_norm = 'rms': patterns of normed keys are no linear map of x_k; use `pattern`")
        return self.W_K @ self.W_Q.swapaxes(1, 2)

    @property
    def W_M(self) -> Float[np.ndarray, "H d d"]:
        """W^M_i = W^V_i W^O_i, of rank d_h at most (PM-14)."""
        return self.W_V @ self.W_O

    def pattern(self, x_k: Float[np.ndarray, "n d"], offset: Int[np.ndarray, "n"]) -> Float[np.ndarray, "H n d"]:
        """(x_k W^K R_k) R_q^T W^Q^T: the patterns of tokens that stand `offset` = position k - position q from a query.

        Turns depend on the difference alone, and messages on neither. Normed keys are normed first; of normed queries
        the scale is in here, and `Neurons.query_map` divides by their size.
        """
        return self._input_weights(np.einsum("nd,Hdk->Hnk", x_k, self.W_K), offset)

    def message(self, x_v: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "H n d"]:
        """x_v W^V W^O."""
        return np.einsum("nd,Hdk->Hnk", x_v, self.W_V) @ self.W_O

    def network(
        self,
        keys: Float[np.ndarray, "H n k"],
        values: Float[np.ndarray, "H n k"],
        activation: Any,
        offset: Int[np.ndarray, "n"],
        gate_keys: Float[np.ndarray, "H n k"] | None = None,
    ) -> Neurons:
        """The neurons of keys and values, before norms and turns."""
        return Neurons(
            self._input_weights(keys, offset),
            values @ self.W_O,
            activation,
            scale=self.W_Q.shape[2] ** -0.5,
            gates=None if gate_keys is None else self._input_weights(gate_keys, offset),
            query_map=None if self.query_scale is None else self.W_Q,
        )

    def _input_weights(
        self, keys: Float[np.ndarray, "H n k"], offset: Int[np.ndarray, "n"]
    ) -> Float[np.ndarray, "H n d"]:
        if self.key_scale is not None:
            keys = keys / root_mean_square(keys) * self.key_scale
        keys = turned(keys, offset, self.rope_base)
        if self.query_scale is not None:
            keys = keys * self.query_scale
        return keys @ self.W_Q.swapaxes(1, 2)


def heads_of(part: Params, config: ModelConfig) -> Heads:
    """The heads of anything that has `qkv` and `output`: a part of a mixer, or an AA-MoE layer."""
    qkv, size = part["qkv"], config.head_dim
    query = _by_head(qkv["query"]["kernel"], size)
    key, value = (_repeated(qkv[name], config) for name in ("key", "value"))
    normed = [_float64(qkv[f"{name}_norm"]["scale"]) if config.qk_norm == "rms" else None for name in ("query", "key")]
    output = _kernel(part, "output").reshape(config.num_heads, size, -1)
    return Heads(query, key, value, output, normed[0], normed[1], config.rope_base)


def _repeated(projection: Params, config: ModelConfig) -> Float[np.ndarray, "H d k"]:
    """The weights of every head, those of a group again for each of its heads."""
    return np.repeat(_by_head(projection["kernel"], config.head_dim), config.num_heads // config.kv_heads, axis=0)


def as_neurons(
    name: str,
    mixer: Params,
    config: ModelConfig,
    x: Float[np.ndarray, "n d"] | None = None,
    positions: Int[np.ndarray, "n"] | None = None,
) -> dict[str, Neurons]:
    """Every network of a layer, by name: `heads`, `memory`, `feed_forward`, `experts` (PM-01).

    Which neurons a mixer leaves out for a token, and what a router multiplies or adds, is not in here: heads are those
    of attention to all tokens, experts all that there are.

    Args:
      name, mixer: as `mixers_of` gives them.
      x: normed inputs that the heads have grown by, the last of them the query's; None: heads are still empty. Where
        queries come from a convolution, evaluate at the last row of `convolved`.
      positions: in the document; None: 0, 1, 2, ...

    Raises:
      ConfigError: the mixer is not readable (`registry.Entry`).
    """
    if not MIXERS[name].readable:
        reason = "whose weights follow from products with its input"
        raise ConfigError(f"mixer {name!r} cannot be read as neurons, {reason}")
    x = np.zeros((0, config.d_model)) if x is None else x
    positions = np.arange(len(x)) if positions is None else positions
    found: dict[str, Neurons] = {}
    for part in _parts(mixer):
        if "qkv" in part:
            heads, activation = heads_of(part, config), MIXERS[name].heads
            maps = [heads.W_V, *([_repeated(part["gate"], config)] if activation == "gated_root" else [])]
            keys = np.einsum("nd,Hdk->Hnk", convolved(part, x), heads.W_K)
            values, *gates = (np.einsum("nd,Hdk->Hnk", x, weights) for weights in maps)
            found["heads"] = heads.network(keys, values, activation, positions - positions[-1:], *gates)
        for rows, label in (("memory", "memory"), ("expert", "experts")):
            if f"{rows}_keys" in part:
                found[label] = _persistent(part, config, rows)
        if "key" in part:
            found["feed_forward"] = _feed_forward(part, "key", _kernel(part, "value"))
        if "down" in part:  # a SwiGLU whose output weights are multiplied by W^O
            found["feed_forward"] = _feed_forward(part, "up", _kernel(part, "down") @ _kernel(part, "output"))
        if "keys" in part:
            keys, values = _float64(part["keys"]), _float64(part["values"])
            found["experts"] = Neurons(keys.swapaxes(1, 2), values, "relu")
    return found


def convolved(part: Params, x: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
    """What the keys of a layer are projected from: its inputs, or their causal convolution."""
    if "convolution" not in part:
        return x
    kernel = _float64(part["convolution"]["kernel"])
    earlier = np.concatenate([np.zeros_like(kernel), x])
    return x + sum(
        weights * earlier[len(kernel) - back : len(earlier) - back] for back, weights in enumerate(kernel, 1)
    )


def mixers_of(params: Params, config: ModelConfig) -> Iterator[tuple[int, str, Params]]:
    """Every mixer of a model in order: its layer, counted from 0, its name and its parameters."""
    blocks = params["periods"]["blocks"]
    for period in range(config.periods):
        for index, (layer, name) in enumerate(config.mixers):
            stacked = blocks[f"{index}_{name}"]["mixer"]
            own = jax.tree.map(lambda leaf, period=period: np.asarray(leaf[period]), stacked)
            yield period * len(config.pattern) + layer, name, own


def _persistent(part: Params, config: ModelConfig, rows: str) -> Neurons:
    """Keys and values that are parameters: they meet queries un-turned, and share a softmax with the heads."""
    tables = (np.reshape(part[f"{rows}_{kind}"], (-1, config.d_model)) for kind in ("keys", "values"))
    keys, values = (_by_head(table, config.head_dim) for table in tables)
    return heads_of(part, config).network(keys, values, "softmax", np.zeros(keys.shape[1], int))


def _feed_forward(part: Params, inwards: str, outwards: Float[np.ndarray, "n d"]) -> Neurons:
    gates = _kernel(part, "gate").T[None] if "gate" in part else None
    return Neurons(_kernel(part, inwards).T[None], outwards[None], "relu" if gates is None else "swiglu", gates=gates)


# Sizes.


class Rank(NamedTuple):
    """Of the messages of one network."""

    largest: int
    """What the shape allows: d_h where W^O of a head makes the messages, however many there are."""
    numerical: int
    """Singular values above 1e-6 of the largest."""
    stable: float
    """Sum of squared singular values over the largest squared: directions that matter."""


def ranks(name: str, mixer: Params, config: ModelConfig) -> dict[str, list[Rank]]:
    """The rank of what every network of a layer can write to the residual stream (PM-14).

    Of heads that of W^M_i, since messages of tokens are in its row space.
    """
    found = {}
    for label, neurons in as_neurons(name, mixer, config).items():
        if label == "heads":
            heads = heads_of(next(part for part in _parts(mixer) if "qkv" in part), config)
            spectra = [_product_spectrum(*pair) for pair in zip(heads.W_V, heads.W_O, strict=True)]
        else:
            spectra = [np.linalg.svd(messages, compute_uv=False) for messages in neurons.M]
        most = config.d_model if neurons.activation in ("relu", "swiglu") else config.head_dim
        found[label] = [_rank(spectrum, most) for spectrum in spectra]
    return found


def _rank(spectrum: Float[np.ndarray, "k"], most: int) -> Rank:
    top = max(spectrum[0], np.finfo(np.float64).tiny)
    return Rank(min(len(spectrum), most), int((spectrum > 1e-6 * top).sum()), float(np.square(spectrum / top).sum()))


def _product_spectrum(left: Float[np.ndarray, "d k"], right: Float[np.ndarray, "k e"]) -> Float[np.ndarray, "k"]:
    """The singular values of a product, of which no more than k are not 0, without multiplying it out."""
    return np.linalg.svd(np.linalg.qr(left)[1] @ np.linalg.qr(right.T)[1].T, compute_uv=False)


def parameters(name: str, config: ModelConfig) -> int:
    """Parameters of one mixer (PM-07). None is made."""
    return parameter_count(_shapes(name, config))


def static_neurons(config: ModelConfig) -> int:
    """Learned neurons of the stack: hidden units, and persistent rows once per head."""
    return config.periods * sum(_learned(name, config) for _, name in config.mixers)


def neurons_per_token(config: ModelConfig, messages: Literal["all", "distinct"] = "all") -> int:
    """Neurons that a token adds to the heads of the stack; `distinct`: groups of heads with tied values count once."""
    heads = config.num_heads if messages == "all" else config.kv_heads
    return heads * config.periods * sum(MIXERS[name].heads is not None for _, name in config.mixers)


def crossover(config: ModelConfig, messages: Literal["all", "distinct"] = "all") -> int:
    """Tokens after which heads have as many neurons as were learned (PM-08).

    Raises:
      ValueError: no layer has heads that tokens add neurons to.
    """
    if not (per_token := neurons_per_token(config, messages)):
        raise ValueError(f"pattern = {config.pattern!r}: tokens add no neurons")
    return -(-static_neurons(config) // per_token)


def active_neurons(figures: Mapping[str, Sequence[float]], config: ModelConfig) -> dict[str, list[float]]:
    """Neurons of every head that AA-MoE layers evaluate for a token, on average: m for each resource given (PM-08).

    Args:
      figures: per AA-MoE layer, as `Evaluation.statistics` and `layers` of metrics.jsonl have them.
    """
    spent, m = np.asarray(figures["spent"]), config.aamoe.chunk_size
    return {kind: (m * spent * figures[f"pairs_{kind}"]).tolist() for kind in ("local", "context", "expert")}


def likely_tokens(
    messages: Float[np.ndarray, "*n d"], params: Params, config: ModelConfig, count: int
) -> Int[np.ndarray, "*n count"]:
    """The tokens that a message speaks for most, best first: its direct effect on the logits, norm's scale included."""
    readout = _float64(params["embedding"] if config.embedding == "tied" else params["readout"])
    logits = messages * _float64(params["norm"]["scale"]) @ readout.T
    return np.argsort(-logits, axis=-1, kind="stable")[..., :count]


def _learned(name: str, config: ModelConfig) -> int:
    total = 0
    for part in _parts(_shapes(name, config)):
        shapes = {name: value.shape for name, value in part.items() if name.endswith("keys")}
        shapes |= {name: part[name]["kernel"].shape for name in ("key", "down") if name in part}
        rows = [math.prod(shapes[name][:-1]) for name in ("memory_keys", "expert_keys") if name in shapes]
        total += config.num_heads * sum(rows) + shapes.get("key", (0, 0))[1] + shapes.get("down", (0,))[0]
        total += shapes["keys"][0] * shapes["keys"][2] if "keys" in shapes else 0
    return total


def _shapes(name: str, config: ModelConfig) -> Params:
    """The parameters of a mixer, without their numbers."""
    return nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: build_mixer(name, config, rngs=nnx.Rngs(0)))))


def _parts(mixer: Params) -> Sequence[Params]:
    """What stands side by side in a mixer, or in what it routes tokens through; an AA-MoE layer is one part."""
    if "attention" in mixer:
        return [mixer["attention"], mixer["feed_forward"]]
    return list(mixer["parts"].values()) if "parts" in mixer else [mixer]


# Arithmetic.


def silu(x: Float[np.ndarray, "*n"]) -> Float[np.ndarray, "*n"]:
    """x sigma(x)."""
    return x / (1 + np.exp(-x))


def root_mean_square(x: Float[np.ndarray, "*n k"]) -> Float[np.ndarray, "*n 1"]:
    """What `layers.Norm` divides by."""
    return np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6)


def turned(x: Float[np.ndarray, "H n k"], position: Int[np.ndarray, "n"], base: float) -> Float[np.ndarray, "H n k"]:
    """`layers.rotate` to these positions, which may be negative."""
    half = x.shape[-1] // 2
    angle = position[:, None] * base ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _by_head(weights: Any, size: int) -> Float[np.ndarray, "H n k"]:
    """Columns [n, H k] as heads."""
    weights = _float64(weights)
    return weights.reshape(weights.shape[0], -1, size).swapaxes(0, 1)


def _kernel(part: Params, name: str) -> Float[np.ndarray, "n d"]:
    return _float64(part[name]["kernel"])


def _float64(x: Any) -> Float[np.ndarray, "..."]:
    return np.asarray(x, np.float64)
