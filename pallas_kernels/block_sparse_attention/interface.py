"""One function, several implementations: attention of every token over the few resources it was given."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels import chips
from pallas_kernels.block_sparse_attention import operation, reference, xla
from pallas_kernels.block_sparse_attention.block_sizes import DEFAULT, BlockSizes
from pallas_kernels.block_sparse_attention.operation import XLA_WINDOW, LocalWindow, NoPairs, Path
from pallas_kernels.block_sparse_attention.tpu import dense, dispatch, gathered, resident
from pallas_kernels.block_sparse_attention.tpu import window as window_lib
from pallas_kernels.block_sparse_attention.types import Attention, Inputs, Pairs, Problem, Window, require_float
from pallas_kernels.varying import varying


def _plan_on_gpu(problem: Problem) -> Path:
    from pallas_kernels.block_sparse_attention.gpu import path  # JAX's compiler for them is slow to load

    return path.plan(problem)


PLANS: dict[str, tuple[Callable[[Problem], Path], LocalWindow]] = {
    "xla": (xla.plan, XLA_WINDOW),
    "pallas_tpu_resident": (resident.plan, window_lib.BY_TOKEN_ON_TPUS),
    "pallas_tpu_gathered": (gathered.plan, window_lib.ON_TPUS),
    "pallas_tpu_dense": (dense.plan, window_lib.LOCAL),
    "pallas_gpu": (_plan_on_gpu, XLA_WINDOW),
}
"""What plans the pairs of a call, with a ValueError for what it cannot do; and how the window is computed."""
IMPLEMENTATIONS = ("reference", *PLANS)
FASTEST_TPU = "pallas_tpu"  # whichever of the three `tpu.dispatch` picks
SELDOM = "if_wanted"  # the scope of what most steps leave out, for those who count what a program does


def block_sparse_attention(
    query: Float[Array, "T H d"],
    query_expert: Float[Array, "T H d"],
    key: Float[Array, "R m H d"],
    value: Float[Array, "R m H d"],
    pairs: Pairs,
    *,
    num_context: int,
    max_pairs: int,
    window: Window | None = None,
    scale: float | None = None,
    max_score: Float[Array, ""] | None = None,
    with_mass: Bool[Array, ""] | bool = True,
    row_chunks: int | None = None,
    implementation: str | None = None,
    block_sizes: BlockSizes | None = None,
) -> Attention:
    """Eq 16 and the softmax over it: one distribution over all keys of all resources of a token, and its window.

        A[i,h,(r,j)] = scale * q[i,h] . key[r,j,h] + bias[i,r]       output[i,h] = sum softmax(A[i,h])[r,j] value[r,j,h]

    T tokens (batch and length flat), K slots a token, R resources of m keys each, H heads of size d.

    Args:
      query: (rotated) meets resources below `num_context`, the context chunks, and the window. bfloat16 or float32;
        the kernels for TPUs alone refuse float16.
      query_expert: (un-rotated) meets the resources from `num_context` on, the experts.
      key, value: the resource table: context chunks first, then experts.
      pairs: which resources each token meets. A token may not name one resource twice. A pair whose resource is none
        of 0..R-1 is hidden, by every implementation: no share, no gradient, and nothing outside the table is read.
      num_context: how many of the resources are context chunks.
      max_pairs: static bound on sum(pairs.count), which the caller guarantees; it bounds work and memory. Pairs past
        it, in token order, are dropped.
      window: adds the last m tokens as one more resource. Tokens are then the context chunks laid flat:
        T == num_context * m and the key of token t is key[t // m, t % m]. A routed chunk that overlaps the window
        counts its keys twice unless `pairs.visible` hides them.
      scale: of the scores; None is d ** -0.5.
      max_score: what no |scale * q . k| exceeds, where norms of queries and keys say so; not differentiated. Where it
        is small, kernels need not look for the largest score. It must not depend on the tokens: what a token gets
        would, by a rounding, depend on later ones. None: unknown.
      with_mass: whether the mass is wanted, which most steps of a training run do without. Where it is not, mass is
        0, and what is computed for it alone is left out. A traced value chooses while the program runs: nothing is
        compiled again.
      row_chunks: chunks of one row, where a batch of rows of equal length lies flat. A pair with another row's chunk is
        hidden, like one with no resource. None: one row.
      implementation: a name in IMPLEMENTATIONS; or "pallas_tpu", the fastest of the three for TPUs by `tpu.dispatch`.
        None: on one device or inside `jax.shard_map`, since the compiler cannot divide a kernel over a mesh,
        "pallas_tpu" on a TPU, and "pallas_gpu" on a Hopper GPU (16-bit floats, d <= 128); "xla" elsewhere. Away from a
        TPU its kernels are interpreted, for tests. "pallas_gpu" is for Hopper GPUs and for a B200, which gets "xla"
        by default, since its kernels have never run on one; any other GPU gets "xla", with a line in the log. Where
        there is no GPU it is refused, but that under `chips.assume("h200")`, or "b200", XLA computes its tiles, for
        tests.
      block_sizes: how the named implementation cuts its work, where its own choice is not the best:
        `python -m pallas_kernels.tune` looks for a better one.

    Returns:
      `Attention`, differentiable in query, query_expert, key, value, pairs.bias and window.bias through `output` and
      `lse`. Products in the dtype of the inputs with float32 accumulation; softmax statistics in float32.

    Over a mesh, call it inside `jax.shard_map`: heads may be sharded (output and lse follow; mass is then the mean over
    the local heads), tokens with their tables may be sharded, or resources, merging the outputs outside by `lse`.
    """
    name = _fastest(query) if implementation is None else implementation
    if name not in (known := {*IMPLEMENTATIONS, *PLANS, FASTEST_TPU}):
        raise ValueError(f"implementation={name!r} is unknown; available: {', '.join(sorted(known))}")
    inputs = Inputs(query, query_expert, key, value, pairs, max_score)
    require_float(name, query=query)
    _check_shapes(inputs, window, num_context, max_pairs)
    _check_rows(len(query), num_context, row_chunks)
    if name == "pallas_gpu" and not chips.takes_gpu_kernels(f"implementation={name!r}"):
        name, block_sizes = "xla", None
    (tokens, heads, d), (resources, m), slots = query.shape, key.shape[:2], pairs.resource.shape[1]
    scale = d**-0.5 if scale is None else float(scale)
    most = max(1, min(max_pairs, pairs.resource.size))  # no more pairs than there are slots
    sizes = _require_named(block_sizes, implementation)
    shape = tokens, heads, d, resources, m, slots
    problem = Problem(*shape, query.dtype, num_context, most, scale, sizes, row_chunks)
    inputs = inputs._replace(pairs=_hide_unknown(pairs, problem))
    if name == FASTEST_TPU:
        name = f"{FASTEST_TPU}_{dispatch.fastest(problem)}"
    if name == "reference":
        output, lse, mass = reference.attend(inputs, window, problem)
        return Attention(output, lse, _if_wanted(with_mass, pairs, lambda: jax.lax.stop_gradient(mass)))
    inputs, window = varying((inputs, window))
    if slots > 0:
        path, local = plan(name, problem), PLANS[name][1]
    else:  # and no kernel that picks tokens
        path, local = NoPairs(problem), window_lib.ON_TPUS if name.startswith(FASTEST_TPU) else XLA_WINDOW
    tables = path.tables(inputs.pairs)
    output, lse, parts, _ = operation.attend((path, local), inputs, window, tables)
    given = jax.lax.stop_gradient((inputs, tables, parts, lse))
    return Attention(output, lse, _if_wanted(with_mass, inputs.pairs, lambda: path.mass(*given)))


def _fastest(query: Float[Array, "T H d"]) -> str:
    if chips.kernels_by_default():
        return FASTEST_TPU
    if chips.gpu_kernels_by_default():
        from pallas_kernels.block_sparse_attention.gpu.path import LARGEST_HEAD, TYPES  # slow to load

        if query.dtype in TYPES and query.shape[2] <= LARGEST_HEAD:
            return "pallas_gpu"
    return "xla"


def _if_wanted(
    with_mass: Bool[Array, ""] | bool, pairs: Pairs, mass: Callable[[], Float[Array, "T K"]]
) -> Float[Array, "T K"]:
    nothing = lambda: jnp.zeros_like(pairs.bias, jnp.float32)  # noqa: E731
    if isinstance(with_mass, bool):
        return mass() if with_mass else nothing()
    with jax.named_scope(SELDOM):
        return jax.lax.cond(with_mass, mass, nothing)


def plan(name: str, problem: Problem) -> Path:
    """How an implementation in PLANS computes the pairs of a call.

    Raises:
      ValueError: it cannot; or `problem.block_sizes` has a size that it does not have, or cannot take.
    """
    path = PLANS[name][0](problem)
    known = path.block_sizes.given()
    for size, value in problem.block_sizes.given().items():
        if size not in known:
            raise ValueError(f"block_sizes.{size}={value}: implementation={name!r} has {' and '.join(known)} alone")
    return path


def _require_named(block_sizes: BlockSizes | None, implementation: str | None) -> BlockSizes:
    """Refuses sizes of an implementation that is not known before the shapes are."""
    if block_sizes is not None and block_sizes.given() and implementation not in PLANS:
        raise ValueError(
            f"block_sizes={block_sizes}: wanted implementation= to name whose they are: {', '.join(PLANS)}"
        )
    return block_sizes or DEFAULT


def _hide_unknown(pairs: Pairs, problem: Problem) -> Pairs:
    """A pair whose resource is not in the table, or of another row, has number R and bias -inf. It is in no tile of
    `tables.build` or of `compaction.build`, and in no row that `dense` shows; a path for which every pair must be in a
    tile clips it."""
    resource, resources = pairs.resource, problem.resources
    known = (resource >= 0) & (resource < resources)
    if problem.rows > 1:
        chunks = problem.chunks_of_row
        first = jnp.arange(problem.tokens)[:, None] // problem.row_length * chunks
        known &= (resource >= problem.num_context) | ((resource >= first) & (resource < first + chunks))
    return pairs._replace(
        resource=jnp.where(known, resource, resources),
        bias=jnp.where(known, pairs.bias, -jnp.inf),
    )


def _check_rows(tokens: int, num_context: int, row_chunks: int | None) -> None:
    """Refuses rows that are not all of one length."""
    if row_chunks is None or num_context == 0:
        return
    if row_chunks < 1 or num_context % row_chunks or tokens % (num_context // row_chunks):
        raise ValueError(
            f"row_chunks={row_chunks}; wanted a number of chunks that divides num_context={num_context} into rows, as "
            f"many as divide {tokens} tokens"
        )


def _check_shapes(inputs: Inputs, window: Window | None, num_context: int, max_pairs: int) -> None:
    """Refuse what cannot work, naming the argument, its value and what is wanted."""
    query, query_expert, key, value, pairs, _ = inputs
    if query.ndim != 3 or key.ndim != 4:
        raise ValueError(f"query.shape={query.shape}, key.shape={key.shape}; wanted [T, H, d] and [R, m, H, d]")
    if not 0 <= num_context <= len(key):
        raise ValueError(f"num_context={num_context}; wanted 0 to {len(key)}, the number of resources")
    if max_pairs < 0:
        raise ValueError(f"max_pairs={max_pairs}; wanted a bound of at least 0")
    each = tokens, _ = len(query), pairs.resource.shape[-1]
    wanted: list[tuple[str, Any, Any]] = [
        ("query_expert.shape", query_expert.shape, query.shape),
        ("key.shape[2:]", key.shape[2:], query.shape[1:]),
        ("value.shape", value.shape, key.shape),
        ("pairs.count.shape", pairs.count.shape, (tokens,)),
    ]
    wanted += [
        (f"{name}.dtype", x.dtype, query.dtype) for name, x in zip(inputs._fields[1:4], inputs[1:4], strict=True)
    ]
    wanted += [(f"pairs.{name}.shape", x.shape, each) for name, x in zip(pairs._fields[:3], pairs[:3], strict=True)]
    if window is not None:
        wanted += [("with a window, the number of tokens", tokens, num_context * key.shape[1])]
        wanted += [(f"window.{name}.shape", x.shape, (tokens,)) for name, x in zip(window._fields, window, strict=True)]
    for name, got, want in wanted:
        if got != want:
            raise ValueError(f"{name} is {got}; wanted {want}")
