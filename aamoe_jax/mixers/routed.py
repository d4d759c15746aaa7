"""Softmax attention of every query to the keys of some clusters alone, in time that grows with what is read.

Keys are sorted by cluster, and so are pairs of a query and a cluster that it reads; each cluster begins a block of its
own. A block of pairs meets the blocks of its cluster's keys, up to its last token: scores are held block by block, as
in `flash.py`. What a query reads of its clusters is then merged. Within a cluster all is in the order of the text, so
no bit of what a token gets depends on later ones.

Shapes: b rows, S keys per row, q queries of them, H heads, G heads of keys and values, r = H / G, k = d / H, C
clusters, K of them that a query reads. A row with one head of keys is a problem of n = b G: it has Q = q r queries,
P = Q K pairs, x blocks of t pairs, y blocks of t keys.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from aamoe_jax.mixers.costs import Number
from aamoe_jax.mixers.flash import LOWEST, Attended, Place
from pallas_kernels.varying import varying

BLOCK = 128
"""t."""

Outputs = tuple[Float[Array, "n Q k"], Float[Array, "n Q"]]
"""The output, and the log-sum-exp of the scores: LOWEST where no key is read, and the output 0."""


class Tokens(NamedTuple):
    """What attends to what."""

    query: Float[Array, "n Q k"]
    key: Float[Array, "n S k"]
    value: Float[Array, "n S k"]
    bias: Float[Array, "n S"]
    """Added to the scores of a key, in float32."""


class Routes(NamedTuple):
    """Who reads what."""

    cluster: Int[Array, "n S"]
    """Of every key, from 0; C or more: of none."""
    read: Int[Array, "n Q K"]
    """The clusters that a query reads, none of them twice; C or more: none."""
    start: Int[Array, "n Q"]
    """The first key of the row that it may read."""
    token: Int[Array, "n Q"]
    """The place of the query in its row, and so the last key that it may read."""
    beside: Bool[Array, "n Q"]
    """Whether it reads the key in its place beside those."""


class Sizes(NamedTuple):
    """What is static."""

    clusters: int
    """C."""
    block: int
    """t."""
    group: int
    """r: queries of the same token follow each other, and those of the next token them."""


class Sorted(NamedTuple):
    """N things in blocks of t, by cluster; in the order that they had within one."""

    content: Int[Array, "x t"]
    """Which of them is in this place; N: none."""
    cluster: Int[Array, "x"]
    """Of every block; C: an empty one."""
    place: Int[Array, "N"]
    """Of every one, in blocks laid flat; past the end for what is in no cluster."""


def routed_attention(
    query: Float[Array, "b q H k"],
    key: Float[Array, "b S G k"],
    value: Float[Array, "b S G k"],
    cluster: Int[Array, "b S G"],
    read: Int[Array, "b q H K"],
    start: Int[Array, "b q"],
    *,
    clusters: int,
    beside: Bool[Array, "b q H"] | None = None,
    bias: Float[Array, "b S G"] | None = None,
    first: Place = 0,
    block: int = BLOCK,
) -> Attended:
    """softmax(q K^T / sqrt(k) + bias) V over the keys, up to its own, that a query reads.

    Args:
      cluster, read, start, beside: see `Routes`; a query whose own key is `beside` reads none of that key's cluster.
      clusters: C.
      bias: added to the scores of a key, in float32; None: 0.
      first: the place in the row of the first query; the others follow.

    Returns:
      `Attended`, differentiable in query, key, value and bias through both. Products in the type of the inputs, sums
      and softmax in float32.
    """
    (rows, queries, heads, _), (length, groups) = query.shape, key.shape[1:3]
    each = heads // groups

    def of_queries(x: Array) -> Array:
        rest = x.shape[3:]
        grouped = x.reshape(rows, queries, groups, each, *rest).swapaxes(1, 2)
        return grouped.reshape(rows * groups, queries * each, *rest)

    def of_keys(x: Array) -> Array:
        return x.swapaxes(1, 2).reshape(rows * groups, length, *x.shape[3:])

    bias = jnp.zeros(key.shape[:3], jnp.float32) if bias is None else bias
    tokens = Tokens(of_queries(query), *map(of_keys, (key, value, bias)))
    places = jnp.broadcast_to(first + jnp.arange(queries), start.shape)
    beside = jnp.zeros(read.shape[:3], bool) if beside is None else beside
    of_tokens = (jnp.broadcast_to(x[:, :, None], beside.shape) for x in (start, places))
    routes = Routes(of_keys(cluster), of_queries(read), *map(of_queries, (*of_tokens, beside)))
    found = _routed(Sizes(clusters, min(block, length), each), *varying((tokens, routes)))
    output, lse = (x.reshape(rows, groups, queries, each, *x.shape[2:]).swapaxes(1, 2) for x in found)
    return Attended(output.reshape(query.shape), lse.reshape(query.shape[:3]))


def loop(length: int, clusters: int = 1, kept: int = 1, share: float = 1.0) -> Number:
    """Scores that a head computes over a row of one document, where this share of the keys is in clusters, keys and
    queries are spread evenly over them, and a query reads `kept` of them."""
    block = min(BLOCK, length)
    pairs, keys = length * kept / clusters, length * share / clusters  # of every cluster
    ends = (min(1.0, (at + 1) * block / pairs) for at in range(math.ceil(pairs / block)))
    return block**2 * clusters * sum(math.ceil(keys * end / block) for end in ends)


def sort_by_cluster(cluster: Int[Array, "N"], clusters: int, block: int) -> Sorted:
    """Every cluster from the beginning of a block on."""
    count = len(cluster)
    order = jnp.argsort(cluster, stable=True)
    edges = jnp.searchsorted(cluster[order], jnp.arange(clusters + 1))
    first, sizes = edges, jnp.diff(edges, append=edges[-1])  # of a cluster after the last, nothing
    ends = jnp.cumsum(-(-sizes // block))
    begins = ends - -(-sizes // block)
    index = jnp.arange((count + clusters * (block - 1)) // block)
    of_block = jnp.minimum(jnp.searchsorted(ends[:-1], index, side="right"), clusters)
    rank = (block * (index - begins[of_block]))[:, None] + jnp.arange(block)
    there = rank < sizes[of_block][:, None]
    found = order[jnp.minimum(first[of_block][:, None] + rank, count - 1)]
    of_thing = jnp.minimum(cluster, clusters)
    place = block * begins[of_thing] + jnp.argsort(order) - first[of_thing]
    nowhere = block * len(index)
    return Sorted(
        jnp.where(there, found, count), of_block, jnp.where(cluster < clusters, place, nowhere).astype(jnp.int32)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _routed(sizes: Sizes, tokens: Tokens, routes: Routes) -> Outputs:
    return _forward(sizes, tokens, routes)[0]


def _forward(sizes: Sizes, tokens: Tokens, routes: Routes) -> tuple[Outputs, tuple[Any, ...]]:
    output, lse = jax.lax.map(lambda problem: _Problem(sizes, *problem).forward(), (tokens, routes))
    return (output, lse), (tokens, routes, output, lse)


def _backward(sizes: Sizes, residuals: tuple[Any, ...], cotangents: Outputs) -> tuple[Tokens, None]:
    tokens, routes, output, lse = residuals
    d_output, d_lse = cotangents
    # d score = weight (d weight - delta); of the log-sum-exp the weights are the gradient.
    delta = jnp.sum(output.astype(jnp.float32) * d_output.astype(jnp.float32), axis=-1) - d_lse

    def of_problem(problem: Any) -> Tokens:
        given, (d_output, lse, delta) = problem
        return _Problem(sizes, *given).backward(d_output, lse, delta)

    return jax.lax.map(of_problem, ((tokens, routes), (d_output, lse, delta))), None


_routed.defvjp(_forward, _backward)


class _Problem:
    """One row and head of keys; arrays are as in `Tokens` and `Routes`, without n."""

    def __init__(self, sizes: Sizes, tokens: Tokens, routes: Routes):
        self.sizes, self.tokens, self.routes = sizes, tokens, routes
        self.reads = routes.read.shape[-1]
        self.pairs = sort_by_cluster(routes.read.reshape(-1), sizes.clusters, sizes.block)
        self.keys = sort_by_cluster(routes.cluster, sizes.clusters, sizes.block)
        self.key, self.value, self.bias = (
            x.at[self.keys.content].get(mode="fill", fill_value=0) for x in (tokens.key, tokens.value, tokens.bias)
        )
        self.begin, self.end = self._bounds(len(tokens.key), sizes.clusters)
        self.scale = tokens.query.shape[-1] ** -0.5

    def _bounds(self, keys: int, clusters: int) -> tuple[Int[Array, "x"], Int[Array, "x"]]:
        """From which block of keys on, and up to which, a block of pairs has any to meet."""
        index = self.keys.content
        first, last = index[:, 0], jnp.where(index < keys, index, -1).max(-1)
        token, start = self._range(self.pairs.content)
        meets = (self.pairs.cluster[:, None] == self.keys.cluster) & (self.pairs.cluster[:, None] < clusters)
        meets &= (first <= token.max(-1)[:, None]) & (last >= start.min(-1)[:, None])
        begin, end = jnp.argmax(meets, 1), meets.shape[1] - jnp.argmax(jnp.flip(meets, 1), 1)
        return begin, jnp.where(meets.any(1), end, begin)

    def _range(self, pair: Int[Array, "*x"]) -> tuple[Int[Array, "*x"], Int[Array, "*x"]]:
        """The last and the first key that a pair may read; of no pair, none."""
        query = pair // self.reads
        token = self.routes.token.at[query].get(mode="fill", fill_value=-1)
        return token, self.routes.start.at[query].get(mode="fill", fill_value=len(self.tokens.key))

    def _rows(self, x: Array, i: Array) -> Array:
        """Of the queries of a block of pairs; of no pair, those of any."""
        return x.at[self.pairs.content[i] // self.reads].get(mode="clip")

    def _scores(
        self, query: Float[Array, "t k"], token: Int[Array, "t"], start: Int[Array, "t"], j: Array
    ) -> tuple[Float[Array, "t t"], Bool[Array, "t t"]]:
        """Of a block of pairs and a block of keys: the scores, and which of them are seen."""
        index = self.keys.content[j]
        seen = (index <= token[:, None]) & (index >= start[:, None])
        scores = self.scale * _product("ik,jk->ij", query, self.key[j]) + self.bias[j]
        return jnp.where(seen, scores, LOWEST), seen

    def forward(self) -> tuple[Float[Array, "Q k"], Float[Array, "Q"]]:
        """The output, and the log-sum-exp of the scores."""

        def of_pairs(i: Array) -> tuple[Float[Array, "t k"], Float[Array, "t"]]:
            query, (token, start) = self._rows(self.tokens.query, i), self._range(self.pairs.content[i])

            def meet(j: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
                output, top, total = state
                scores, seen = self._scores(query, token, start, j)
                new_top = jnp.maximum(top, scores.max(-1))
                weights, decay = jnp.where(seen, jnp.exp(scores - new_top[:, None]), 0), jnp.exp(top - new_top)
                values = _product("ij,jk->ik", weights.astype(self.value.dtype), self.value[j])
                return output * decay[:, None] + values, new_top, total * decay + weights.sum(-1)

            zeros = jnp.zeros_like(query, jnp.float32)
            nothing = zeros, zeros[:, 0] + LOWEST, zeros[:, 0]
            output, top, total = jax.lax.fori_loop(self.begin[i], self.end[i], meet, nothing)
            total = jnp.where(total > 0, total, 1)
            return (output / total[:, None]).astype(query.dtype), top + jnp.log(total)

        outputs, lses = jax.lax.map(of_pairs, jnp.arange(len(self.begin)))
        lses = [*self._of_reads(lses.reshape(-1), LOWEST), self._own_score()]
        lse = jax.nn.logsumexp(jnp.stack(lses), axis=0)
        shares = [jnp.where(one > LOWEST, jnp.exp(one - lse), 0)[:, None] for one in lses]
        parts = [*self._of_reads(outputs.reshape(-1, outputs.shape[-1]), 0), self._own(self.tokens.value)]
        output = functools.reduce(jnp.add, [share * part for share, part in zip(shares, parts, strict=True)])
        return output.astype(outputs.dtype), jnp.maximum(lse, LOWEST)

    def _of_reads(self, x: Array, fill: Number) -> list[Array]:
        """Of pairs in their places, what belongs to the first cluster that each query reads, the second, and so on."""
        places = self.pairs.place.reshape(-1, self.reads)
        return [x.at[places[:, read]].get(mode="fill", fill_value=fill) for read in range(self.reads)]

    def _own(self, x: Array) -> Array:
        """Of the key in the place of every query."""
        return x.at[self.routes.token].get(mode="clip")

    def _own_score(self) -> Float[Array, "Q"]:
        """Of the keys that queries read beside their clusters."""
        key, bias = self._own(self.tokens.key), self._own(self.tokens.bias)
        score = self.scale * jnp.einsum("qk,qk->q", self.tokens.query, key, preferred_element_type=jnp.float32)
        return jnp.where(self.routes.beside, score + bias, LOWEST)

    def _with_own(
        self, gradients: Tokens, d_output: Float[Array, "Q k"], lse: Float[Array, "Q"], delta: Float[Array, "Q"]
    ) -> Tokens:
        """Gradients, and those of the keys that queries read beside their clusters."""
        d_output, query = d_output.astype(jnp.float32), self.tokens.query.astype(jnp.float32)
        weights = jnp.where(self.routes.beside, jnp.exp(self._own_score() - lse), 0)
        d_scores = weights * ((d_output * self._own(self.tokens.value)).sum(-1) - delta)
        d_query = gradients.query + (self.scale * d_scores)[:, None] * self._own(self.tokens.key)
        own = (self.scale * d_scores)[:, None] * query, weights[:, None] * d_output, d_scores
        first = self.routes.token[0]

        def added(x: Array, y: Array) -> Array:
            y = y.reshape(-1, self.sizes.group, *y.shape[1:]).sum(1)
            there = jax.lax.dynamic_slice_in_dim(x, first, len(y))
            return jax.lax.dynamic_update_slice_in_dim(x, there + y, first, axis=0)

        return Tokens(d_query, *(added(x, y) for x, y in zip(gradients[1:], own, strict=True)))

    def backward(self, d_output: Float[Array, "Q k"], lse: Float[Array, "Q"], delta: Float[Array, "Q"]) -> Tokens:
        """The gradients."""

        def of_pairs(d_keys: tuple[Array, ...], i: Array) -> tuple[tuple[Array, ...], Array]:
            query, d_rows, lses, deltas = (self._rows(x, i) for x in (self.tokens.query, d_output, lse, delta))
            token, start = self._range(self.pairs.content[i])

            def meet(j: Array, state: tuple[Array, tuple[Array, ...]]) -> tuple[Array, tuple[Array, ...]]:
                d_query, d_keys = state
                scores, seen = self._scores(query, token, start, j)
                weights = jnp.where(seen, jnp.exp(scores - lses[:, None]), 0)
                d_weights = _product("ik,jk->ij", d_rows, self.value[j])
                d_scores = weights * (d_weights - deltas[:, None])
                scaled = (self.scale * d_scores).astype(query.dtype)
                new = (
                    _product("ij,ik->jk", scaled, query),
                    _product("ij,ik->jk", weights.astype(query.dtype), d_rows),
                    d_scores.sum(0),
                )
                added = (
                    jax.lax.dynamic_update_index_in_dim(x, x[j] + y, j, axis=0)
                    for x, y in zip(d_keys, new, strict=True)
                )
                return d_query + _product("ij,jk->ik", scaled, self.key[j]), tuple(added)

            zeros = jnp.zeros_like(query, jnp.float32)
            d_query, d_keys = jax.lax.fori_loop(self.begin[i], self.end[i], meet, (zeros, d_keys))
            return d_keys, d_query

        zeros = tuple(jnp.zeros_like(x, jnp.float32) for x in (self.key, self.value, self.bias))
        d_keys, d_queries = jax.lax.scan(of_pairs, zeros, jnp.arange(len(self.begin)))
        d_query = functools.reduce(jnp.add, self._of_reads(d_queries.reshape(-1, d_queries.shape[-1]), 0))
        d_key, d_value, d_bias = (
            x.reshape(-1, *x.shape[2:]).at[self.keys.place].get(mode="fill", fill_value=0) for x in d_keys
        )
        gradients = self._with_own(Tokens(d_query, d_key, d_value, d_bias), d_output, lse, delta)
        return Tokens(*(x.astype(y.dtype) for x, y in zip(gradients, self.tokens, strict=True)))


def _product(dimensions: str, left: Array, right: Array) -> Float[Array, "_ _"]:
    return jnp.einsum(dimensions, left, right, preferred_element_type=jnp.float32)
