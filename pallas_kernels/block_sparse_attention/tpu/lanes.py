"""How heads lie in the lanes of a TPU's registers: side by side, group after group.

A layout has `groups`, `heads` of a group, `d` lanes of a head and `lanes` of a group.

Shapes: N rows, M after padding, T tokens, W tokens after padding, H heads, d head size, G head groups,
h heads a group, E lanes of all groups.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from pallas_kernels.tpu import LANES, round_up


def group_heads(heads: int, d: int, lanes: int, cores: int) -> tuple[int, int, int]:
    """Groups, heads a group, lanes a head: groups of whole registers, of at most `lanes` or the least there is; as many
    for each of the `cores` of a device, where there are heads enough."""
    d = LANES // 2 if d <= LANES // 2 else round_up(d, LANES)
    unit = max(1, LANES // d)  # heads that fill whole registers
    groups = -(-heads // max(unit, lanes // d // unit * unit))
    groups = min(round_up(groups, cores), -(-heads // unit))
    return groups, round_up(-(-heads // groups), unit), d


def pad_rows(x: Shaped[Array, "N *U"], length: int, fill: int | float = 0) -> Shaped[Array, "M *U"]:
    """`length` rows, the new ones of `fill`."""
    return jnp.pad(x, [(0, length - len(x)), *[(0, 0)] * (x.ndim - 1)], constant_values=fill)


def to_lanes(x: Shaped[Array, "*N H d"], layout, lanes: int | None = None) -> Shaped[Array, "*N E"]:
    """Heads one after the other, padded; every group to `lanes`, by default those of the layout."""
    *rest, heads, d = x.shape
    pad, lanes = [(0, 0)] * len(rest), layout.lanes if lanes is None else lanes
    x = jnp.pad(x, [*pad, (0, layout.groups * layout.heads - heads), (0, layout.d - d)])
    x = x.reshape(*rest, layout.groups, layout.heads * layout.d)
    return jnp.pad(x, [*pad, (0, 0), (0, lanes - x.shape[-1])]).reshape(*rest, -1)


def from_lanes(x: Shaped[Array, "*N E"], layout, heads: int, d: int) -> Shaped[Array, "*N H d"]:
    """What `to_lanes` came from."""
    x = x.reshape(*x.shape[:-1], layout.groups, -1)[..., : layout.heads * layout.d]
    return x.reshape(*x.shape[:-2], layout.groups * layout.heads, layout.d)[..., :heads, :d]


def to_stats(x: Float[Array, "T H"], layout, tokens: int, fill: int | float) -> Float[Array, "G h W"]:
    """A row over `tokens` for every head."""
    x = pad_rows(pad_rows(x, tokens, fill).T, layout.groups * layout.heads, fill)
    return x.reshape(layout.groups, layout.heads, -1)
