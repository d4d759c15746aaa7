"""What block-sparse and paged attention take and return, and what their implementations hand to each other.

Shapes: T tokens, K slots a token, R resources, m keys a resource, H heads, d head size; b sequences.
"""

import itertools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.block_sparse_attention.block_sizes import DEFAULT, BlockSizes


class Pairs(NamedTuple):
    """Which resources every token meets: a token's slots below `count`, each resource at most once a token.

    Slots at or past `count` are ignored, whatever they hold.
    """

    resource: Int[Array, "T K"]  # row of key/value; slot k-1 is rank k among the routed ones
    bias: Float[Array, "T K"]  # added to every score of the pair (all heads, all keys); -inf hides the pair
    visible: Int[Array, "T K"]  # only the first `visible` keys of the resource are seen by this token (1..m)
    count: Int[Array, "T"]  # type: ignore[assignment]  # hides a method of tuples, here and below


class Window(NamedTuple):
    """The last m tokens, self included, as one more resource of every token."""

    bias: Float[Array, "T"]  # added to every score of the window; -inf: this token has no window
    segment: Int[Array, "T"]  # tokens see each other only within one segment (rows of a batch, packed documents)


class Attention(NamedTuple):
    """The result. A token that attends to nothing has output 0, lse -inf, mass 0 and gradients 0."""

    output: Float[Array, "T H d"]
    lse: Float[Array, "T H"]  # log of the softmax denominator, biases included; float32; differentiable
    mass: Float[Array, "T K"]  # share of the attention on each pair, mean over heads; float32; NOT differentiable


class Slots(NamedTuple):
    """Which resources every sequence's token meets: its slots below `count`; the others mean nothing."""

    resource: Int[Array, "b K"]  # the sequence's own pages 0..l-1, the shared experts l..l+E-1
    bias: Float[Array, "b K"]  # added to every score of the slot
    begin: Int[Array, "b K"]  # keys begin <= j < end of the resource are seen
    end: Int[Array, "b K"]
    count: Int[Array, "b"]  # type: ignore[assignment]


class Cache(NamedTuple):
    """Keys and values that decoding reads; experts may have a type of their own."""

    page_key: Float[Array, "b l m H d"]
    page_value: Float[Array, "b l m H d"]
    expert_key: Float[Array, "E m H d"]
    expert_value: Float[Array, "E m H d"]


class Inputs(NamedTuple):
    """What the routed pairs are computed from."""

    query: Float[Array, "T H d"]
    query_expert: Float[Array, "T H d"]
    key: Float[Array, "R m H d"]
    value: Float[Array, "R m H d"]
    pairs: Pairs
    max_score: Float[Array, ""] | None  # no |scale * q . k| exceeds it; None: nobody knows


def require_float(implementation: str, **arrays: Array) -> None:
    """Refuses a type that an implementation cannot multiply: "pallas_tpu*" takes bfloat16 and float32, the others any
    float.

    Raises:
      ValueError: names the argument, its dtype and what to do.
    """
    for name, x in arrays.items():
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name}.dtype is {x.dtype}; wanted a float: cast it to bfloat16 or float32")
        if implementation.startswith("pallas_tpu") and x.dtype not in (jnp.bfloat16, jnp.float32):
            raise ValueError(
                f"{name}.dtype is {x.dtype}; the TPU kernels take bfloat16 or float32: cast it, or "
                "implementation='xla' takes it"
            )


class Problem(NamedTuple):
    """The static numbers of a call."""

    tokens: int
    heads: int
    d: int
    resources: int
    m: int
    slots: int
    dtype: jnp.dtype
    num_context: int  # resources below meet `query`, the others `query_expert`
    max_pairs: int  # at least 1
    scale: float
    block_sizes: BlockSizes = DEFAULT  # those that the caller has set
    row_chunks: int | None = None  # chunks of one row of the batch; None: it is one row

    @property
    def experts(self) -> int:
        """Resources that are not context."""
        return self.resources - self.num_context

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self.num_context // self.row_chunks if self.row_chunks and self.num_context else 1

    @property
    def row_length(self) -> int:
        """Tokens of a row."""
        return max(1, self.tokens // self.rows)

    @property
    def chunks_of_row(self) -> int:
        """Resources of the context that a row has."""
        return self.num_context // self.rows

    def met(self, windows: int) -> float:
        """Resources that each of so many windows of tokens meets, added up over these: all experts, and the chunks
        from the start of its first row to its end."""
        row = max(1, self.chunks_of_row)
        ends = [self.num_context * window / windows for window in range(windows + 1)]
        return windows * self.experts + sum(end - begin // row * row for begin, end in itertools.pairwise(ends))


class Partial(NamedTuple):
    """A softmax over some of the keys; 0 and -inf for a token that has seen none."""

    output: Float[Array, "T H d"]
    lse: Float[Array, "T H"]


class Cotangents(NamedTuple):
    """What gradients of scores follow from: d score = p (d output . v - delta), p = exp(scale q.k + bias - lse)."""

    output: Float[Array, "T H d"]
    lse: Float[Array, "T H"]  # over all keys of the token; 0 where there are none
    delta: Float[Array, "T H"]  # output . d output - d lse


class Gradients(NamedTuple):
    """In float32, and those of queries and keys without the factor `scale`, until they are `finished`."""

    query: Float[Array, "T H d"]
    query_expert: Float[Array, "T H d"]
    key: Float[Array, "R m H d"]
    value: Float[Array, "R m H d"]
    bias: Float[Array, "T K"]

    def finished(self, problem: Problem) -> "Gradients":
        """Those of the problem's inputs, in their type; of the bias in float32."""
        scaled = [x * problem.scale for x in (self.query, self.query_expert, self.key)]
        return Gradients._make((*(x.astype(problem.dtype) for x in (*scaled, self.value)), self.bias))
