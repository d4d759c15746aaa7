"""Inside `jax.shard_map`: over which axes of the mesh arrays vary."""

import jax
from jaxtyping import PyTree


def equally_varying(arrays: PyTree) -> PyTree:
    """Lets every array vary over the axes that any of them varies over: kernels and loops want arguments of one type.

    Done outside a custom VJP, so that autodiff adds the sums over those axes. Nothing changes elsewhere.
    """
    axes = frozenset().union(*(_axes(x) for x in jax.tree.leaves(arrays)))
    return jax.tree.map(
        lambda x: jax.lax.pcast(x, tuple(axes - _axes(x)), to="varying") if axes - _axes(x) else x, arrays
    )


def _axes(x: jax.Array) -> frozenset:
    return jax.typeof(x).manual_axis_type.varying
