"""Inside `jax.shard_map`: over which axes of the mesh arrays vary."""

from collections.abc import Iterable
from typing import Any

import jax


def varying(arrays: Any, axes: Iterable[str] | None = None) -> Any:
    """The same arrays, free to differ between devices along these axes. The transpose adds up over those.

    Args:
      axes: None: those along which any of the arrays varies, for kernels and loops want arguments of one type. Done
        outside a custom VJP, so that autodiff adds the sums. Outside of `shard_map` nothing changes.
    """
    varies = lambda x: jax.typeof(x).manual_axis_type.varying  # noqa: E731
    axes = frozenset().union(*map(varies, jax.tree.leaves(arrays))) if axes is None else frozenset(axes)
    return jax.tree.map(lambda x: jax.lax.pcast(x, tuple(sorted(axes - varies(x))), to="varying"), arrays)
