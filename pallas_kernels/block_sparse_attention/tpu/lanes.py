"""How heads lie in the lanes of a TPU's registers: side by side, group after group.

Shapes: N rows, M after padding, T tokens, W tokens padded to whole tiles, H heads, d head size, G head groups,
h heads a group, E lanes of all groups.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from pallas_kernels.tpu import LANES, round_up


def group_heads(heads: int, d: int, lanes: int) -> tuple[int, int, int]:
    """Groups, heads a group, lanes a head: groups of whole registers, of at most `lanes` or the least there is."""
    d = LANES // 2 if d <= LANES // 2 else round_up(d, LANES)
    unit = max(1, LANES // d)  # heads that fill whole registers
    groups = -(-heads // max(unit, lanes // d // unit * unit))
    return groups, round_up(-(-heads // groups), unit), d


def pad_rows(x: Shaped[Array, "N *U"], length: int, fill: int | float = 0) -> Shaped[Array, "M *U"]:
    """`length` rows, the new ones of `fill`."""
    return jnp.pad(x, [(0, length - len(x)), *[(0, 0)] * (x.ndim - 1)], constant_values=fill)


def side_by_side(x: Shaped[Array, "*N H d"], layout) -> Shaped[Array, "*N E"]:
    """Heads one after the other, padded; `layout` has groups, heads of a group, d."""
    *rest, heads, d = x.shape
    x = jnp.pad(x, [*[(0, 0)] * len(rest), (0, layout.groups * layout.heads - heads), (0, layout.d - d)])
    return x.reshape(*rest, -1)


def to_stats(x: Float[Array, "T H"], layout, fill: float) -> Float[Array, "G h W"]:
    """A row over tokens for every head; `layout` also has tiles and tokens a tile."""
    x = pad_rows(pad_rows(x, layout.tiles * layout.tile, fill).T, layout.groups * layout.heads, fill)
    return x.reshape(layout.groups, layout.heads, -1)
