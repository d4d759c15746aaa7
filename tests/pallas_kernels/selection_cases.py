"""What the chips' compilers are given: selection alone, and after the router's product as in the layer."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.selection import select

HIGHEST = jax.lax.Precision.HIGHEST
shape = jax.ShapeDtypeStruct


def selection(*, rows: int, length: int, resources: int, slots: int, implementation: str):
    """Of scores that are there."""
    run = functools.partial(select, slots=slots, implementation=implementation)
    run_for = lambda score, count: run(score, count=count)  # noqa: E731
    return run_for, (shape((rows, length, resources), jnp.float32), shape((rows, length), jnp.int32))


def gradient(*, rows: int, length: int, resources: int, slots: int, implementation: str):
    """Of a function of the selected scores."""

    def loss(score, count, weight):
        selected = select(score, slots, count, implementation=implementation)
        used = jnp.arange(slots) < count[..., None]
        return jnp.sum(jnp.where(used, jnp.sin(selected.score) * weight, 0.0)), selected.resource

    sizes = (resources,), (), (slots,)
    kinds = jnp.float32, jnp.int32, jnp.float32
    arguments = tuple(shape((rows, length, *size), kind) for size, kind in zip(sizes, kinds, strict=True))
    return jax.grad(loss, has_aux=True), arguments


def routing(*, rows: int, length: int, chunks: int, experts: int, width: int, slots: int, implementation: str):
    """The router's product, what hides scores, and the choice."""

    def route(query, key, embedding, available, count):
        by_chunk = jnp.einsum("bid,bjd->bij", query, key, precision=HIGHEST)
        by_expert = jnp.einsum("bid,ed->bie", query, embedding, precision=HIGHEST)
        score = jnp.where(available, jnp.concatenate([by_chunk, by_expert], -1), -jnp.inf)
        return select(score, slots, count, implementation=implementation)

    f32, resources = jnp.float32, chunks + experts
    vectors = [shape((*sizes, width), f32) for sizes in ((rows, length), (rows, chunks), (experts,))]
    return route, (*vectors, shape((rows, length, resources), bool), shape((rows, length), jnp.int32))
