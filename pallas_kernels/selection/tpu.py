"""Selection on a TPU: one pass over the scores for every rank that somebody wants, instead of a sort of all of them.

1024 tokens are the lanes of one vector register, so a resource's scores are a register, and a pass finds every token's
best by comparing registers: no reduction across lanes, and ties fall to the lower index because comparisons run in its
order. Passes end with the largest count of the block.

The router's product is not part of it. Its 6 passes of float32 cost some 10 times as much as writing and reading the
scores (d = 1024), its gradient is a product with the dense gradient of the scores, and some of them are replaced or
hidden between the two (a token's own chunk, other documents).

Shapes: b rows, L tokens a row, A resources, K slots; in the kernel, R and S are A and K in whole registers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import chips
from pallas_kernels.residuals import RESIDUALS
from pallas_kernels.tpu import LANES, ROWS, call, compiled_or_interpreted, round_up
from pallas_kernels.varying import varying

BLOCK = ROWS * LANES  # tokens
GROUP = 32  # resources in one basic block: enough to hide latencies
TAKEN = np.iinfo(np.int32).min  # below every score's key
VMEM_SLACK = 2 * 2**20


def select(
    score: Float[Array, "b L A"], count: Int[Array, "b L"], slots: int
) -> tuple[Int[Array, "b L K"], Float[Array, "b L K"]]:
    """See `interface.select`.

    Raises:
      ValueError: the chip's fast memory does not hold a block of so many resources.
    """
    if 0 in (count.size, slots):
        return jnp.zeros((*count.shape, slots), jnp.int32), jnp.zeros((*count.shape, slots))
    if not fits(score.shape[2], slots):
        raise ValueError(
            f"{slots} of {score.shape[2]} resources need {vmem_bytes(score.shape[2], slots) / 2**20:.0f} MiB of VMEM; "
            f"wanted at most {chips.TPUS[chips.current()].vmem // 2**20}: implementation='xla' has no such bound"
        )
    return _select(slots, score.shape[2], *varying((score, count)))


def _forward(slots, resources, score, count):
    shape = count.shape
    if shape[1] % BLOCK:
        score, count = score.reshape(1, -1, resources), count.reshape(1, -1)
    padding = -count.shape[1] % BLOCK
    # Resources by tokens, row by row: a product that makes scores writes them so at no cost.
    score = jnp.pad(score.swapaxes(1, 2), ((0, 0), (0, -resources % ROWS), (0, padding)))
    padded = jnp.pad(jnp.clip(count, 0, slots), ((0, 0), (0, padding)))
    arrays = padded.reshape(len(padded), -1, BLOCK).max(-1), score, padded[:, None]
    selected = compiled_or_interpreted(_call, *arrays, slots=slots, resources=resources)
    selected = [x[:, :slots, : count.shape[1]].swapaxes(1, 2).reshape(*shape, slots) for x in selected]
    resource, best = checkpoint_name(selected, RESIDUALS)
    return (resource, best), (count.reshape(shape), resource)


def _backward(slots, resources, residuals, cotangents):
    """Every token's slots hold different resources: a sum over slots that compares, and scatters nothing.

    Tokens are the lanes, as in the kernel.
    """
    count, resource = residuals
    d_best = jnp.where(jnp.arange(slots) < count[..., None], cotangents[1], 0.0)
    chosen = resource.swapaxes(1, 2)[:, :, None] == jnp.arange(resources)[:, None]
    d_score = jnp.where(chosen, d_best.swapaxes(1, 2)[:, :, None], 0.0).sum(1)
    return d_score.swapaxes(1, 2), None


_select = jax.custom_vjp(lambda *arguments: _forward(*arguments)[0], (0, 1))
_select.defvjp(_forward, _backward)


def _key(score: Float[Array, "8 128"]) -> Int[Array, "8 128"]:
    """The integer of the same order: of negative numbers, all bits but the sign are turned over."""
    bits = jax.lax.bitcast_convert_type(score, jnp.int32)
    return bits ^ ((bits >> 31) & np.iinfo(np.int32).max)


def _number(key: Int[Array, "8 128"]) -> Float[Array, "8 128"]:
    """The inverse of `_key`, which is its own but for the types."""
    return jax.lax.bitcast_convert_type(key ^ ((key >> 31) & np.iinfo(np.int32).max), jnp.float32)


def _best(candidates: list) -> tuple:
    """The largest key of (key, index) in ascending order of index: a tournament in which the earlier one wins ties."""
    while len(candidates) > 1:
        candidates = [_better(*pair) for pair in zip(candidates[::2], candidates[1::2], strict=True)]
    return candidates[0]


def _better(earlier: tuple, later: tuple) -> tuple:
    wins = later[0] > earlier[0]
    return tuple(jnp.where(wins, new, old) for old, new in zip(earlier, later, strict=True))


def _register(r):
    return pl.ds(pl.multiple_of(r * ROWS, ROWS), ROWS)


def _turn(keys, c) -> list:
    """Eight registers, read across: row t of all of them makes register t."""
    return [keys[pl.ds(c * ROWS * ROWS + t, ROWS, stride=ROWS), :] for t in range(ROWS)]


def _kernel(
    rounds, score_ref, count_ref, resource_ref, best_ref, keys, chosen, chosen_keys, *, resources: int, group: int
):
    padded = len(keys) // ROWS

    def to_keys(c, carry):
        """A register of 8 resources by 128 tokens, 8 times, becomes one of 1024 tokens for each resource."""
        first = c * ROWS
        for t in range(ROWS):
            keys[_register(first + t), :] = _key(score_ref[0, _register(c), pl.ds(t * LANES, LANES)])
        for s, key in enumerate(_turn(keys, c)):
            keys[_register(first + s), :] = key
        return carry

    def rank(k, previous):
        def compete(number, so_far):
            first = number * group
            taken, candidates = previous - first, []
            for j in range(group):
                key = jnp.where(taken == j, TAKEN, keys[_register(first + j), :])
                keys[_register(first + j), :] = key
                candidates.append((key, jnp.full((ROWS, LANES), j)))
            key, index = _best(candidates)
            return _better(so_far, (key, index + first))

        nobody = jnp.full((ROWS, LANES), TAKEN), jnp.zeros((ROWS, LANES), jnp.int32)
        key, index = jax.lax.fori_loop(0, padded // group, compete, nobody)
        chosen[_register(k), :], chosen_keys[_register(k), :] = index, key
        return index

    def write(c, carry):
        """Back to registers of 8 slots by 128 tokens. Slots that nobody wanted hold whatever was there."""
        slot = c * ROWS + jax.lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 0)
        for t, (index, key) in enumerate(zip(_turn(chosen, c), _turn(chosen_keys, c), strict=True)):
            tokens = pl.ds(t * LANES, LANES)
            used = slot < count_ref[0, :, tokens]
            resource_ref[0, _register(c), tokens] = jnp.where(used, index, 0)
            best_ref[0, _register(c), tokens] = jnp.where(used, _number(key), -jnp.inf)
        return carry

    jax.lax.fori_loop(0, score_ref.shape[1] // ROWS, to_keys, 0, unroll=2)
    for r in range(resources, padded):
        keys[_register(r), :] = jnp.full((ROWS, LANES), TAKEN)
    jax.lax.fori_loop(0, rounds[pl.program_id(0), pl.program_id(1)], rank, jnp.full((ROWS, LANES), -1))
    jax.lax.fori_loop(0, resource_ref.shape[1] // ROWS, write, 0)


def vmem_bytes(resources: int, slots: int) -> int:
    """Fast memory of a block: keys, and two buffers of whatever comes and goes."""
    resources, slots = round_up(resources, GROUP), round_up(slots, ROWS)
    return BLOCK * 4 * (3 * resources + 6 * slots + 2 * ROWS) + VMEM_SLACK


def fits(resources: int, slots: int) -> bool:
    """Whether the fast memory of the TPU that code is traced for holds a block."""
    return vmem_bytes(resources, slots) <= chips.TPUS[chips.current()].vmem


def _call(
    rounds: Int[Array, "b blocks"],
    score: Float[Array, "b R M"],
    count: Int[Array, "b 1 M"],
    *,
    slots: int,
    resources: int,
    interpret: bool,
) -> tuple[Int[Array, "b S M"], Float[Array, "b S M"]]:
    group = 8 if interpret else GROUP  # interpreted, every resource is compiled as a slice of a whole array
    padded, slots = round_up(resources, group), round_up(slots, ROWS)
    shape = len(score), slots, score.shape[2]
    of_score, of_count, out = (
        pl.BlockSpec((1, size, BLOCK), lambda row, i, _: (row, 0, i)) for size in (score.shape[1], 1, slots)
    )
    return call(
        functools.partial(_kernel, resources=resources, group=group),
        "selection",
        rounds.shape,
        (rounds,),
        [(of_score, score), (of_count, count)],
        [(out, shape, jnp.int32), (out, shape, jnp.float32)],
        scratch=[pltpu.VMEM((size * ROWS, LANES), jnp.int32) for size in (padded, slots, slots)],
        semantics=("parallel", "parallel"),
        vmem_bytes=vmem_bytes(padded, slots),
        cost=pl.CostEstimate(
            flops=5 * slots * score.size,
            bytes_accessed=4 * (score.size + count.size + 2 * slots * count.size),
            transcendentals=0,
        ),
        interpret=interpret,
    )
