"""What block-sparse attention takes and returns. T tokens, K slots a token, H heads, d head size."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class Pairs(NamedTuple):
    """Which resources every token meets: a token's slots below `count`, each resource at most once a token.

    Slots at or past `count` are ignored, whatever they hold.
    """

    resource: Int[Array, "T K"]  # row of key/value; slot k-1 is rank k among the routed ones
    bias: Float[Array, "T K"]  # added to every score of the pair (all heads, all keys); -inf hides the pair
    visible: Int[Array, "T K"]  # only the first `visible` keys of the resource are seen by this token (1..m)
    count: Int[Array, "T"]


class Window(NamedTuple):
    """The last m tokens, self included, as one more resource of every token."""

    bias: Float[Array, "T"]  # added to every score of the window; -inf: this token has no window
    segment: Int[Array, "T"]  # tokens see each other only within one segment (rows of a batch, packed documents)


class Attention(NamedTuple):
    """The result. A token that attends to nothing has output 0, lse -inf, mass 0 and gradients 0."""

    output: Float[Array, "T H d"]
    lse: Float[Array, "T H"]  # log of the softmax denominator, biases included; float32; differentiable
    mass: Float[Array, "T K"]  # share of the attention on each pair, mean over heads; float32; NOT differentiable
