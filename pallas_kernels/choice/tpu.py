"""P(choose) on a TPU: scores of a tile of tokens are made, divided and added up in fast memory, head by head.

XLA writes g (l + E) scores of every head and token to main memory, reads them for their maximum and their sums, and
keeps them for the backward pass. Here none leaves fast memory, and the backward pass makes them again; it adds its
gradients of the queries to those that they have from elsewhere, in place of XLA, which would take a pass for that.

Scores are transposed, keys by tokens: everything per token is a row of lanes, sums over keys are sums of registers, and
so are those over the g pooled keys of a resource, which lie in g blocks of rows.

Shapes: as in `interface`; G groups of heads; n is l in whole registers of rows, e is E; L is T in whole tiles of t
tokens.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float

from pallas_kernels import chips
from pallas_kernels.residuals import RESIDUALS
from pallas_kernels.tpu import F32, LANES, LOG2_E, LOWEST, ROWS, call, compiled_or_interpreted, dot, round_up
from pallas_kernels.varying import varying

TILE = 256  # tokens
GROUP = 1024  # lanes of the heads that one step takes, at most
PARTS = {"default": 1, "high": 2, "highest": 3}
"""Of a key in bfloat16: what the first leaves over is in the second, and what both leave in the third."""
VMEM_SLACK = 8 * 2**20
"""Scores, weights and their gradients for a few heads, and spilled registers."""


class Layout(NamedTuple):
    """How the arrays lie in fast memory."""

    groups: int  # of heads
    heads: int  # of a group
    d: int
    pooled: int  # keys of a resource
    chunks: int  # in whole registers of rows
    experts: int  # the same
    last: int  # experts that are there

    @property
    def lanes(self) -> int:
        """Of a group of heads."""
        return self.heads * self.d

    @property
    def kinds(self) -> tuple[int, int]:
        """Pooled keys of all chunks, and of all experts."""
        return self.pooled * self.chunks, self.pooled * self.experts


def layout_of(heads: int, d: int, chunks: int, pooled: int, experts: int) -> Layout:
    """Groups of as many heads as `GROUP` lanes hold, and as many for every core of a device where heads divide so."""
    possible = [n for n in range(1, heads + 1) if heads % n == 0 and heads // n * d <= max(GROUP, d)]
    cores = chips.current_chip().device_cores
    groups = next((n for n in possible if n % cores == 0), possible[0])
    return Layout(groups, heads // groups, d, pooled, round_up(chunks, ROWS), round_up(experts, ROWS), experts)


def fits(query: tuple[int, ...], dtype: jnp.dtype, chunk_key: tuple[int, ...], experts: int, precision: str) -> bool:
    """Whether the kernels can do it: bfloat16 or float32, heads of whole registers of lanes, chunks and experts, and
    keys, with their gradients, that the fast memory of the TPU holds for which code is traced."""
    (*_, heads, d), (_, chunks, pooled, *_) = query, chunk_key
    if dtype not in (jnp.bfloat16, F32) or d % LANES or 0 in (*query, chunks, experts):
        return False
    layout = layout_of(heads, d, chunks, pooled, experts)
    return (
        vmem_bytes(layout, jnp.dtype(dtype).itemsize, _number_of_parts(dtype, precision)) <= chips.current_chip().vmem
    )


def vmem_bytes(layout: Layout, itemsize: int, parts: int) -> int:
    """Fast memory of the backward pass, with two buffers for whatever comes and goes."""
    keys = sum(layout.kinds) * layout.lanes * (parts * itemsize + 4)  # with gradients
    resources = layout.chunks + layout.experts
    tokens = TILE * (6 * layout.lanes * itemsize + 4 * (layout.chunks + resources))
    return 2 * (keys + tokens) + 4 * 4 * sum(layout.kinds) * TILE + VMEM_SLACK


def attention_shares(
    query: Float[Array, "b T H k"],
    query_expert: Float[Array, "b T H k"],
    chunk_key: Float[Array, "b l g H k"],
    expert_key: Float[Array, "E g H k"],
    available: Bool[Array, "b T l"],
    precision: str,
) -> tuple[Float[Array, "b T R"], Float[Array, "b T H k"], Float[Array, "b T H k"]]:
    """See `interface.attention_shares`.

    Raises:
      ValueError: the kernels cannot do it.
    """
    if not fits(query.shape, query.dtype, chunk_key.shape, len(expert_key), precision):
        raise ValueError(
            f"{query.dtype}, heads of {query.shape[-1]}, {chunk_key.shape[1]} chunks and {len(expert_key)} experts; "
            f"wanted bfloat16 or float32, heads of a multiple of {LANES}, both kinds, and pooled keys that fit fast "
            "memory: implementation='xla'"
        )
    return _attention_shares(precision, *varying((query, query_expert, chunk_key, expert_key, available)))


def _forward(precision, *arrays):
    query, query_expert, chunk_key, expert_key, available = arrays
    layout = layout_of(*query.shape[2:], *chunk_key.shape[1:3], len(expert_key))
    given = _prepared(layout, precision, *arrays)
    found = compiled_or_interpreted(_run_forward, *given, layout=layout).sum(1)
    chunks, experts = found[:, : available.shape[2]], found[:, layout.chunks : layout.chunks + layout.last]
    share = jnp.concatenate([chunks, experts], axis=1)[:, :, : query.shape[1]].swapaxes(1, 2)
    return (checkpoint_name(share, RESIDUALS), query, query_expert), arrays


def _backward(precision, arrays, cotangents):
    (d_share, *d_queries), (query, _, chunk_key, expert_key, _) = cotangents, arrays
    (rows, tokens, heads, d), (_, chunks, pooled, *_) = query.shape, chunk_key.shape
    layout = layout_of(heads, d, chunks, pooled, len(expert_key))
    given = _prepared(layout, precision, *arrays)
    # Scores are in base 2; every head has its part in the mean.
    d_share = d_share.swapaxes(1, 2) / (LOG2_E * heads)
    wide = round_up(tokens, TILE) - tokens
    d_chunks, d_experts = (
        jnp.pad(x, ((0, 0), (0, -x.shape[1] % ROWS), (0, wide))) for x in (d_share[:, :chunks], d_share[:, chunks:])
    )
    d_share = jnp.concatenate([d_chunks, d_experts], axis=1)
    d_queries = [_lanes(x, wide) for x in d_queries]
    found = compiled_or_interpreted(_run_backward, *given, d_share, *d_queries, layout=layout)
    *d_queries, d_chunk, d_expert = found
    d_query, d_query_expert = (x[:, :tokens].reshape(query.shape) for x in d_queries)
    scale = d**-0.5 * LOG2_E
    d_chunk = scale * d_chunk.reshape(rows, pooled, layout.chunks, heads, d)[:, :, :chunks].swapaxes(1, 2)
    d_expert = scale * d_expert.sum(0).reshape(pooled, layout.experts, heads, d)[:, : layout.last].swapaxes(0, 1)
    return d_query, d_query_expert, d_chunk, d_expert, None


_attention_shares = jax.custom_vjp(lambda *arguments: _forward(*arguments)[0], (0,))
_attention_shares.defvjp(_forward, _backward)


def _prepared(layout: Layout, precision: str, query, query_expert, chunk_key, expert_key, available):
    """Queries [b, L, H k]; parts of the keys [b, g n, H k] and [g e, H k]; what scores of chunks are lowered by
    [b, n, L]."""
    _, tokens, heads, d = query.shape
    wide = round_up(tokens, TILE) - tokens
    queries = tuple(_lanes(x, wide) for x in (query, query_expert))

    def keys(x, size):
        """[..., resources, g, H, k] to rows of the first pooled keys, then of the second."""
        x = (d**-0.5 * LOG2_E) * x.astype(F32).reshape(*x.shape[:-2], heads * d).swapaxes(-3, -2)
        x = jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, size - x.shape[-2]), (0, 0)])
        return _parts(x.reshape(*x.shape[:-3], -1, heads * d), query.dtype, precision)

    hidden = jnp.where(available, 0.0, LOWEST).swapaxes(1, 2)
    hidden = jnp.pad(hidden, ((0, 0), (0, layout.chunks - hidden.shape[1]), (0, wide)), constant_values=LOWEST)
    return queries, keys(chunk_key, layout.chunks), keys(expert_key, layout.experts), hidden


def _lanes(x: Float[Array, "b T H k"], wide: int) -> Float[Array, "b L Hk"]:
    """Heads side by side, and so many rows more."""
    return jnp.pad(x.reshape(*x.shape[:2], -1), ((0, 0), (0, wide), (0, 0)))


def _parts(x, dtype, precision: str) -> tuple:
    """What adds up to x."""
    parts = []
    for _ in range(_number_of_parts(dtype, precision)):
        parts.append(x.astype(dtype))
        x = x - parts[-1].astype(F32)
    return tuple(parts)


def _number_of_parts(dtype, precision: str) -> int:
    return 1 if dtype == F32 else PARTS[precision]


class _Head(NamedTuple):
    """What both passes make of a head and a tile: weights of pooled keys, not divided, [n or e, t] each."""

    lanes: slice
    chunks: list
    experts: list

    @classmethod
    def of(cls, number: int, layout: Layout, query, query_expert, chunk_keys, expert_keys, hidden) -> "_Head":
        lanes = slice(number * layout.d, (number + 1) * layout.d)
        both = []
        for ref, parts in ((query, chunk_keys), (query_expert, expert_keys)):
            tokens = ref[0, :, lanes]
            keys = [part[..., lanes].reshape(-1, layout.d) for part in parts]
            both.append(functools.reduce(jnp.add, [dot(x, tokens, (1, 1)) for x in keys]))
        chunks, experts = (
            [score[i * size : (i + 1) * size] for i in range(layout.pooled)]
            for score, size in zip(both, (layout.chunks, layout.experts), strict=True)
        )
        chunks = [score + hidden for score in chunks]
        if layout.last < layout.experts:
            there = jax.lax.broadcasted_iota(jnp.int32, experts[0].shape, 0) < layout.last
            experts = [jnp.where(there, score, LOWEST) for score in experts]
        tops = [functools.reduce(jnp.maximum, scores) for scores in (chunks, experts)]
        top = functools.reduce(jnp.maximum, [jnp.max(x, axis=0, keepdims=True) for x in tops])
        return cls(lanes, *([jnp.exp2(score - top) for score in scores] for scores in (chunks, experts)))

    def weights(self) -> tuple:
        """Of chunks and of experts, all pooled keys of one added up; and one over the sum of all."""
        both = [functools.reduce(jnp.add, weights) for weights in (self.chunks, self.experts)]
        total = functools.reduce(jnp.add, [jnp.sum(x, axis=0, keepdims=True) for x in both])
        return *both, 1.0 / total


def _forward_kernel(*refs, layout: Layout, parts: int):
    query, query_expert, *keys, hidden, share = refs
    chunk_keys, expert_keys = keys[:parts], keys[parts:]
    found = [0.0, 0.0]
    for number in range(layout.heads):
        head = _Head.of(number, layout, query, query_expert, chunk_keys, expert_keys, hidden[0])
        chunks, experts, inverse = head.weights()
        found = [old + x * inverse for old, x in zip(found, (chunks, experts), strict=True)]
    mean = 1.0 / (layout.groups * layout.heads)
    share[0, 0, : layout.chunks, :] = found[0] * mean
    share[0, 0, layout.chunks :, :] = found[1] * mean


def _backward_kernel(*refs, layout: Layout, parts: int):
    query, query_expert, *keys, hidden, d_share, d_query_in, d_query_expert_in = refs[: 2 * parts + 6]
    d_query, d_query_expert, d_chunk, d_expert = refs[2 * parts + 6 :]
    chunk_keys, expert_keys = keys[:parts], keys[parts:]

    @pl.when(pl.program_id(2) == 0)
    def _():
        d_chunk[...] = jnp.zeros_like(d_chunk)
        d_expert[...] = jnp.zeros_like(d_expert)

    d_chunks, d_experts = d_share[0, : layout.chunks, :], d_share[0, layout.chunks :, :]
    for number in range(layout.heads):
        head = _Head.of(number, layout, query, query_expert, chunk_keys, expert_keys, hidden[0])
        chunks, experts, inverse = head.weights()
        mean = jnp.sum(chunks * d_chunks, axis=0, keepdims=True) + jnp.sum(experts * d_experts, axis=0, keepdims=True)
        mean = mean * inverse
        for weights, d_kind, tokens, parts_of, elsewhere, d_tokens, d_keys in (
            (head.chunks, d_chunks, query, chunk_keys, d_query_in, d_query, d_chunk),
            (head.experts, d_experts, query_expert, expert_keys, d_query_expert_in, d_query_expert, d_expert),
        ):
            d_weight = (d_kind - mean) * inverse
            d_score = jnp.concatenate([weight * d_weight for weight in weights], axis=0).astype(tokens.dtype)
            key = parts_of[0][..., head.lanes].reshape(-1, layout.d)
            d_token = elsewhere[0, :, head.lanes].astype(F32) + dot(d_score, key, (0, 0))
            d_tokens[0, :, head.lanes] = d_token.astype(d_tokens.dtype)
            d_keys[0, :, head.lanes] += dot(d_score, tokens[0, :, head.lanes], (1, 0))


def _call(
    kernel, name: str, given, more, results, aliases=None,
    *, layout: Layout, products: int, parallel: bool, interpret: bool,
):  # fmt: skip
    """Over rows, groups of heads and tiles. `more` and `results`: (blocks, array or shape, dtype); `aliases`: of
    `more`, by their number, the result that is written in place of each."""
    queries, chunk_keys, expert_keys, hidden = given
    rows, length, _ = queries[0].shape
    blocks = _Blocks(layout)
    arrays = [(blocks.tokens(), x) for x in queries]
    arrays += [(blocks.keys(layout.kinds[0]), x) for x in chunk_keys]
    arrays += [(blocks.of_all_rows(layout.kinds[1]), x) for x in expert_keys]
    arrays += [(blocks.resources(layout.chunks), hidden), *more]
    scores = rows * length * layout.groups * layout.heads * sum(layout.kinds)
    moved = [x for _, x in arrays] + [jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in results]
    return call(
        functools.partial(kernel, layout=layout, parts=len(chunk_keys)),
        name,
        (rows, layout.groups, length // TILE),
        (),
        arrays,
        results,
        semantics=("parallel", "parallel", "parallel" if parallel else "arbitrary"),
        aliases={len(arrays) - len(more) + i: to for i, to in (aliases or {}).items()},
        vmem_bytes=vmem_bytes(layout, queries[0].dtype.itemsize, len(chunk_keys)),
        cost=pl.CostEstimate(
            flops=2 * (products + len(chunk_keys)) * scores * layout.d,
            transcendentals=scores,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in moved),
        ),
        interpret=interpret,
    )


class _Blocks(NamedTuple):
    """Which part of every array a step sees."""

    layout: Layout

    def tokens(self) -> pl.BlockSpec:
        return pl.BlockSpec((1, TILE, self.layout.lanes), lambda row, group, tile: (row, tile, group))

    def keys(self, number: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, number, self.layout.lanes), lambda row, group, tile: (row, 0, group))

    def of_all_rows(self, number: int) -> pl.BlockSpec:
        return pl.BlockSpec((number, self.layout.lanes), lambda row, group, tile: (0, group))

    def resources(self, number: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, number, TILE), lambda row, group, tile: (row, 0, tile))


def _run_forward(*given, layout: Layout, interpret: bool) -> Float[Array, "b G ne L"]:
    rows, length, _ = given[0][0].shape
    resources = layout.chunks + layout.experts
    block = pl.BlockSpec((1, 1, resources, TILE), lambda row, group, tile: (row, group, 0, tile))
    results = [(block, (rows, layout.groups, resources, length), F32)]
    options: dict[str, Any] = {"layout": layout, "products": 0, "parallel": True, "interpret": interpret}
    return _call(_forward_kernel, "choice_forward", given, (), results, **options)[0]


def _run_backward(*given, layout: Layout, interpret: bool) -> tuple:
    *arrays, d_share, d_query, d_query_expert = given
    (query, _), rows, width = arrays[0], len(arrays[0][0]), layout.groups * layout.lanes
    blocks = _Blocks(layout)
    more = [(blocks.resources(layout.chunks + layout.experts), d_share)]
    more += [(blocks.tokens(), x) for x in (d_query, d_query_expert)]
    results = [(blocks.tokens(), query.shape, query.dtype)] * 2
    results += [(blocks.keys(number), (rows, number, width), F32) for number in layout.kinds]
    options: dict[str, Any] = {"layout": layout, "products": 2, "parallel": False, "interpret": interpret}
    return _call(_backward_kernel, "choice_backward", arrays, more, results, {1: 0, 2: 1}, **options)
