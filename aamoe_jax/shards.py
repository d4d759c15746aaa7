"""The part of a batch that code inside `jax.shard_map` sees, and how it gets at the rest.

Rows are divided over `data` and `fsdp`. The tokens of a row are divided over `resource`, then `tensor`, into contiguous
parts; attention first gathers the tokens of one `tensor` group and takes a part of the heads instead. An axis of
size 1 moves nothing, so the same code runs where there is no mesh at all.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from pallas_kernels.varying import varying

FSDP, RESOURCE, TENSOR = ("fsdp",), ("resource",), ("tensor",)
TOKENS = ("resource", "tensor")
ROWS = ("data", "fsdp")
AXES = ("data", "fsdp", "resource", "tensor")
"""The axes of every mesh. Neighbours along the later ones talk most, and lie closest."""


@dataclasses.dataclass(frozen=True)
class Shards:
    """The sizes of the axes of the mesh around this code. All 1: everything is here."""

    fsdp: int = 1
    resource: int = 1
    tensor: int = 1
    pair_bound: float | None = None
    """See `MeshConfig`."""
    exact: bool = False
    """Whether no capacity of a shard counts: in what is not training."""

    @classmethod
    def of_mesh(cls, mesh: Mesh, pair_bound: float | None) -> Shards:
        """The axes of a mesh."""
        return cls(mesh.shape["fsdp"], mesh.shape["resource"], mesh.shape["tensor"], pair_bound)

    def count(self, axes: tuple[str, ...]) -> int:
        """In how many parts these axes divide."""
        return math.prod(getattr(self, axis) for axis in axes)

    def part(self, x: Array, axes: tuple[str, ...], dimension: int = 1) -> Array:
        """This device's part of what every device has whole."""
        if not (axes := self._moving(axes)):
            return x
        if x.shape[dimension] % self.count(axes):
            raise ValueError(f"dimension {dimension} of {x.shape} cannot be divided over {axes}: {self}")
        size = x.shape[dimension] // self.count(axes)
        return jax.lax.dynamic_slice_in_dim(x, self.start(x.shape[dimension], axes), size, dimension)

    def start(self, length: int, axes: tuple[str, ...]) -> Int[Array, ""] | int:
        """Where this device's part of so many tokens begins."""
        if not (axes := self._moving(axes)):
            return 0
        return jax.lax.axis_index(axes) * (length // self.count(axes))

    def gather(self, x: Array, axes: tuple[str, ...], dimension: int = 1) -> Array:
        """The parts of all devices along these axes, one after the other: the inverse of `part`."""
        if x.shape[dimension] == 0 or not (axes := self._moving(axes)):
            return x
        return _along(functools.partial(jax.lax.all_gather, axis_name=axes, tiled=True), x, dimension)

    def scatter_sum(self, x: Array, axes: tuple[str, ...], dimension: int = 1) -> Array:
        """This device's part of the sum over all devices along these axes."""
        if not (axes := self._moving(axes)):
            return x
        return _along(functools.partial(jax.lax.psum_scatter, axis_name=axes, tiled=True), x, dimension)

    def end_of_part_before(self, x: Array, length: int) -> Array:
        """The last `length` tokens of the part of the rows before this one along `resource`; zeros before the first."""
        if self.resource == 1:
            return jnp.zeros((x.shape[0], length, *x.shape[2:]), x.dtype)
        if x.shape[1] < length:
            raise ValueError(f"{x.shape[1]} tokens of a row on each part of `resource`: must be at least {length}")
        before = [(i, i + 1) for i in range(self.resource - 1)]
        return jax.lax.ppermute(x[:, -length:], RESOURCE, before)

    def for_use(self, param: nnx.Param, dtype: str) -> Array:
        """A parameter as it is used: gathered from where it is stored, still divided by heads and resources.

        Args:
          dtype: of the activations; what is cast to it where it is used, is cast before it travels.
        """
        if self.fsdp == 1:
            return param[...]
        if "storage" in param.axes:
            return _gather_cast(param[...], dtype, param.axes.index("storage"))
        if "storage_float32" in param.axes:
            return self.gather(param[...], FSDP, param.axes.index("storage_float32"))
        return param[...]

    def _moving(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if getattr(self, axis) > 1)


def _along(collective: Callable[[Array], Array], x: Array, dimension: int) -> Array:
    """A collective along one dimension, which becomes the rows of a matrix. XLA for TPUs makes a reduce-scatter of a
    sum whose rows are divided. Where the second dimension of [rows, tokens, d] is, it sums everything on every device,
    at twice the traffic, and takes a slice. The gradient of a gather is such a sum.
    """
    x = jnp.moveaxis(x, dimension, 0)
    found = collective(x.reshape(len(x), -1))
    return jnp.moveaxis(found.reshape(len(found), *x.shape[1:]), 0, dimension)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather_cast(x: Float[Array, "..."], dtype: str, dimension: int) -> Float[Array, "..."]:
    """All parts of a float32 parameter, cast. Their gradients are summed in float32."""
    return jax.lax.all_gather(x.astype(dtype), FSDP, axis=dimension, tiled=True)


def _gather_cast_forward(x: Array, dtype: str, dimension: int) -> tuple[Array, None]:
    return _gather_cast(x, dtype, dimension), None


def _gather_cast_backward(dtype: str, dimension: int, _: None, gradient: Array) -> tuple[Array]:
    gradient = gradient.astype("float32")
    return (jax.lax.psum_scatter(gradient, FSDP, scatter_dimension=dimension, tiled=True),)


_gather_cast.defvjp(_gather_cast_forward, _gather_cast_backward)

WHOLE = Shards(exact=True)
"""No mesh."""


def all_reduce(x: Array, reduce: Callable = jax.lax.psum, axes: tuple[str, ...] = AXES) -> Array:
    """The sum over all devices of the mesh, or along some of its axes, of what each has counted of its own.

    Args:
      reduce: `jax.lax.pmax` for the largest instead.
    """
    return reduce(varying(x, AXES), axes)
