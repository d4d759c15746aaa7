"""Inside `jax.shard_map`: over which axes of the mesh arrays vary."""

from collections.abc import Iterable
from typing import Any

import jax


def varying(arrays: Any, axes: Iterable[str]) -> Any:
    """The same arrays, free to differ between devices along these axes. The transpose adds up over those."""

    missing = lambda x: tuple(sorted(set(axes) - jax.typeof(x).manual_axis_type.varying))  # noqa: E731
    return jax.tree.map(lambda x: jax.lax.pcast(x, missing(x), to="varying"), arrays)


def equally_varying(arrays: Any) -> Any:
    """Lets every array vary over the axes that any of them varies over: kernels and loops want arguments of one type.

    Done outside a custom VJP, so that autodiff adds the sums over those axes. Nothing changes elsewhere.
    """
    leaves = jax.tree.leaves(arrays)
    return varying(arrays, frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in leaves)))
