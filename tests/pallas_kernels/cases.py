"""Inputs of block-sparse attention for tests, and the definition once more as loops over NumPy float64.

Letters: T tokens, K slots, R resources, m keys a resource, H heads, d head size.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.block_sparse_attention import Attention, BlockSizes, Pairs, Window, block_sparse_attention


@dataclasses.dataclass(frozen=True)
class Shape:
    """What random inputs look like. A count is drawn from 0..K unless `count` fixes it."""

    tokens: int = 24
    heads: int = 2
    d: int = 4
    m: int = 8
    num_context: int = 3
    experts: int = 2
    slots: int = 4
    window: bool = True
    segments: int = 2
    count: int | None = None
    spare: int | None = None  # by how much max_pairs exceeds the pairs there are; None: room for every slot
    scale: float | None = None
    bounded: bool = False  # whether a bound on the scores is given
    seed: int = 0


class Inputs(NamedTuple):
    query: jax.Array
    query_expert: jax.Array
    key: jax.Array
    value: jax.Array
    pairs: Pairs
    window: Window | None
    d_output: jax.Array
    d_lse: jax.Array
    max_score: jax.Array | None


class Static(NamedTuple):
    num_context: int
    max_pairs: int
    scale: float | None = None
    block_sizes: BlockSizes | None = None
    row_chunks: int | None = None


class Gradients(NamedTuple):
    query: jax.Array
    query_expert: jax.Array
    key: jax.Array
    value: jax.Array
    pair_bias: jax.Array
    window_bias: jax.Array


def random_inputs(shape: Shape, dtype=jnp.float32) -> tuple[Inputs, Static]:
    rng = np.random.default_rng(shape.seed)
    T, K, R = shape.tokens, shape.slots, shape.num_context + shape.experts
    normal = lambda *size: jnp.asarray(rng.normal(size=size), dtype)  # noqa: E731
    resource = np.argsort(rng.random((T, R)), axis=1)[:, :K].reshape(T, K)
    count = rng.integers(0, K + 1, T) if shape.count is None else np.full(T, shape.count)
    pairs = Pairs(
        resource=jnp.asarray(resource, jnp.int32),
        bias=normal(T, K).astype(jnp.float32),
        visible=jnp.asarray(rng.integers(1, shape.m + 1, (T, K)), jnp.int32),
        count=jnp.asarray(count, jnp.int32),
    )
    segment = np.sort(rng.integers(0, shape.segments, T))
    bias = np.where(rng.random(T) < 0.3, -np.inf, rng.normal(size=T))
    window = Window(jnp.asarray(bias, jnp.float32), jnp.asarray(segment, jnp.int32)) if shape.window else None
    head, table = (T, shape.heads, shape.d), (R, shape.m, shape.heads, shape.d)
    arrays = normal(*head), normal(*head), normal(*table), normal(*table)
    bound = jnp.float32(20.0) if shape.bounded else None  # no test's scores are larger, unless it says so
    inputs = Inputs(*arrays, pairs, window, normal(*head), normal(*head[:2]).astype(jnp.float32), bound)
    max_pairs = T * K if shape.spare is None else int(count.sum()) + shape.spare
    return inputs, Static(shape.num_context, max_pairs, shape.scale)


def evaluate(
    inputs: Inputs, static: Static, implementation: str, with_mass: bool = True
) -> tuple[Attention, Gradients]:
    """The attention, and the gradients of <output, d_output> + <lse, d_lse> over the tokens that attend to anything."""
    return _evaluate(inputs, static, implementation, with_mass)


def attention_and_gradients(inputs: Inputs, static: Static, implementation: str, with_mass: jax.Array | bool = True):
    def loss(query, query_expert, key, value, pair_bias, window_bias):
        window = None if inputs.window is None else inputs.window._replace(bias=window_bias)
        pairs = inputs.pairs._replace(bias=pair_bias)
        attention = block_sparse_attention(
            query,
            query_expert,
            key,
            value,
            pairs,
            window=window,
            max_score=inputs.max_score,
            with_mass=with_mass,
            implementation=implementation,
            **static._asdict(),
        )
        lse = jnp.where(attention.lse > -jnp.inf, attention.lse, 0.0)
        through_output = jnp.sum(attention.output.astype(jnp.float32) * inputs.d_output.astype(jnp.float32))
        return through_output + jnp.sum(lse * inputs.d_lse), attention

    window_bias = jnp.zeros(len(inputs.query)) if inputs.window is None else inputs.window.bias
    arguments = *inputs[:4], inputs.pairs.bias, window_bias
    gradients, attention = jax.grad(loss, argnums=tuple(range(6)), has_aux=True)(*arguments)
    return attention, Gradients(*gradients)


_evaluate = jax.jit(attention_and_gradients, static_argnums=(1, 2))
SHARDED = Shape(heads=4, bounded=True)


def over_heads(
    mesh: Mesh | AbstractMesh, static: Static, implementation: str
) -> Callable[[Inputs], tuple[Attention, Gradients]]:
    """`evaluate` with the heads over the axis `tensor` of a mesh, tables replicated."""
    head, table, pairs = P(None, "tensor"), P(None, None, "tensor"), Pairs(P(), P(), P(), P())
    specs = Inputs(head, head, table, table, pairs, Window(P(), P()), head, head, P())
    # Bias is replicated: its gradient and the mass are sums over the devices' heads.
    outputs = Attention(head, head, P()), Gradients(head, head, table, table, P(), P())

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs,), out_specs=outputs)
    def run(inputs: Inputs):
        attention, gradients = attention_and_gradients(inputs, static, implementation)
        return attention._replace(mass=jax.lax.pmean(attention.mass, "tensor")), gradients

    return run


def number_compiled() -> int:
    """How many shapes `evaluate` has been compiled for."""
    return _evaluate._cache_size()


def naive(inputs: Inputs, static: Static) -> tuple[Attention, Gradients]:
    """`evaluate` by loops in float64, with the softmax's gradient written out. Shares no code with the package."""
    arrays = [np.asarray(x, np.float64) for x in (*inputs[:4], inputs.d_output, inputs.d_lse)]
    query, query_expert, key, value, d_output, d_lse = arrays
    (T, H, d), K = query.shape, inputs.pairs.resource.shape[1]
    scale = d**-0.5 if static.scale is None else static.scale
    result = Attention(np.zeros((T, H, d)), np.full((T, H), -np.inf), np.zeros((T, K)))
    grads = Gradients(*(np.zeros(x.shape) for x in (*inputs[:4], inputs.pairs.bias, np.zeros(T))))
    for t in range(T):
        seen = _seen_keys(inputs, static, t)
        for h in range(H if seen else 0):
            q = np.array([(query if kind != "expert" else query_expert)[t, h] for *_, kind, _ in seen])
            k, v = (np.array([x[r, j, h] for r, j, *_ in seen]) for x in (key, value))
            score = (q * k).sum(1) * scale + np.array([bias for _, _, bias, *_ in seen])
            lse = np.log(np.exp(score - score.max()).sum()) + score.max()
            p = np.exp(score - lse)
            result.output[t, h], result.lse[t, h] = p @ v, lse
            d_score = p * (v @ d_output[t, h] - (p @ v) @ d_output[t, h] + d_lse[t, h])
            for n, (r, j, _, kind, slot) in enumerate(seen):
                d_query = grads.query_expert if kind == "expert" else grads.query
                d_query[t, h] += d_score[n] * scale * k[n]
                grads.key[r, j, h] += d_score[n] * scale * q[n]
                grads.value[r, j, h] += p[n] * d_output[t, h]
                if kind == "window":
                    grads.window_bias[t] += d_score[n]
                else:
                    grads.pair_bias[t, slot] += d_score[n]
                    result.mass[t, slot] += p[n] / H
    return result, grads


def _seen_keys(inputs: Inputs, static: Static, t: int) -> list[tuple[int, int, float, str, int]]:
    """(resource, key, bias, kind, slot) of every key that token t sees."""
    pairs, window, m = jax.tree.map(np.asarray, inputs.pairs), inputs.window, inputs.key.shape[1]
    seen = []
    for slot in range(pairs.count[t]):
        r, bias = int(pairs.resource[t, slot]), float(pairs.bias[t, slot])
        kind = "context" if r < static.num_context else "expert"
        if bias > -np.inf:
            seen += [(r, j, bias, kind, slot) for j in range(pairs.visible[t, slot])]
    if window is not None and window.bias[t] > -np.inf:
        mine = [j for j in range(max(0, t - m + 1), t + 1) if window.segment[j] == window.segment[t]]
        seen += [(j // m, j % m, float(window.bias[t]), "window", -1) for j in mine]
    return seen
