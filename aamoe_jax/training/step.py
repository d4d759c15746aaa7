"""One step of training and one of evaluation: pure functions of state and batch.

Losses are sums over the targets that count, divided once by how many the whole batch has. So the losses and gradients
of micro-batches simply add up, however unevenly the targets are spread over them.

Shapes: b rows, L tokens per row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from aamoe_jax.aamoe.correlations import beside_loss
from aamoe_jax.config import ExperimentConfig, TrainingConfig
from aamoe_jax.mixers.base import BudgetMode
from aamoe_jax.mixers.statistics import combine, over_all_devices
from aamoe_jax.model import merge
from aamoe_jax.shards import AXES, TOKENS, Shards, all_reduce
from aamoe_jax.training.auxiliary import LOSSES, Weights, adapted, auxiliary_loss, loss_weights
from aamoe_jax.training.optimizer import gradient_norm, learning_rate
from aamoe_jax.training.state import Placement, TrainState
from pallas_kernels.varying import varying

Batch = dict[str, Int[Array, "b L"]]
Totals = dict[str, Int[Array, ""]]
Metrics = dict[str, Any]
"""`nll`, `count`, `bytes` (sums over the targets that count) and `statistics`; a training step adds `tokens` (real
ones), `grad_norm`, `learning_rate` and `sparsity_weight`."""
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
EvalStep = Callable[[dict[str, Any], Batch], Metrics]


def make_train_step(
    config: ExperimentConfig,
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    byte_lengths: Int[np.ndarray, "V"],
    placement: Placement,
) -> TrainStep:
    """(state, batch) -> (state, metrics).

    Args:
      byte_lengths: bytes that each token of the vocabulary stands for.
    """

    compute = functools.partial(
        gradients_and_metrics,
        graphdef,
        accumulate=config.training.accumulate,
        shards=placement.shards,
        byte_lengths=byte_lengths,
    )
    everywhere = PartitionSpec()
    each = config.training.log_every == 1  # known while tracing: there is nothing to choose in a step
    more = (everywhere,) if each else (everywhere, everywhere)
    gradients_of = over_mesh(compute, placement, (placement.params, everywhere), *more)
    weights = loss_weights(config.model)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        with_mass = () if each else (is_logged(state.step + 1, config.training),)
        given = weights | {"sparsity_loss": state.sparsity_weight}, *with_mass
        gradients, metrics = gradients_of(state.params, batch, *given)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        # The optimizer's own count, which leaves out the steps that were skipped.
        _, updates_made = optax.tree.get_all_with_path(state.optimizer, "count")[0]
        metrics |= {
            "grad_norm": gradient_norm(gradients),
            "learning_rate": learning_rate(config.optimizer, config.training.steps, updates_made),
            "sparsity_weight": state.sparsity_weight,
        }
        params = optax.apply_updates(state.params, updates)
        sparsity_weight = state.sparsity_weight
        if sparsity_weight.size:  # one for every layer of ReLU experts
            sparsity_weight = adapted(sparsity_weight, metrics["statistics"], config.model)
        after = TrainState(state.step + 1, params, optimizer_state, state.key, sparsity_weight)
        if config.training.nonfinite == "skip":
            finite = jnp.isfinite(metrics["nll"]) & jnp.isfinite(metrics["grad_norm"])
            kept = jax.tree.map(functools.partial(jnp.where, finite), after, state)
            after = kept._replace(step=after.step)  # so that the next batch follows
        return after, metrics

    return train_step


def make_eval_step(
    graphdef: nnx.GraphDef, budget: BudgetMode, byte_lengths: Int[np.ndarray, "V"], placement: Placement
) -> EvalStep:
    """(params, batch) -> sums, with budgets of the given kind."""
    shards = dataclasses.replace(placement.shards, exact=True)  # a measurement drops nothing

    def eval_step(params: dict[str, Any], batch: Batch) -> Metrics:
        totals = batch_totals(batch, shards, byte_lengths)
        _, sums = loss_fn(params, batch, graphdef, shards, totals, budget=budget, detail="tokens")
        return sums | {"count": totals["count"], "bytes": totals["bytes"]}

    return over_mesh(eval_step, placement, PartitionSpec())


def is_logged(step: Int[Array, ""] | int, training: TrainingConfig) -> Bool[Array, ""] | bool:
    """Whether the metrics of a step are written down: the first, every `log_every`-th, and the last."""
    return (step == 1) | (step % training.log_every == 0) | (step == training.steps)


def over_mesh(function: Callable, placement: Placement, out_specs: Any, *more: PartitionSpec) -> Callable:
    """`function(params, batch, ...)` on every device's part of each; see `aamoe_jax.shards`.

    Args:
      more: where the further arguments lie.
    """
    in_specs = (placement.params, placement.batch.spec, *more)
    return jax.shard_map(function, mesh=placement.mesh, in_specs=in_specs, out_specs=out_specs)


def gradients_and_metrics(
    graphdef: nnx.GraphDef,
    params: dict[str, Any],
    batch: Batch,
    weights: Weights,
    with_mass: Bool[Array, ""] | bool = True,
    *,
    accumulate: int,
    shards: Shards,
    byte_lengths: Int[np.ndarray, "V"],
) -> tuple[dict[str, Any], Metrics]:
    """Gradients of the loss over the whole batch, computed in `accumulate` micro-batches one after the other.

    Inside `jax.shard_map`: parameters, rows and gradients are the parts of this device, sums are of all.

    Args:
      weights: of the losses that layers add.
      with_mass: whether statistics hold how attention is divided; else they hold 0.
    """
    totals = batch_totals(batch, shards, byte_lengths)
    # Gradients are summed within a `fsdp` group where its parameters are gathered; over all other devices once, here.
    params, sum_gradients = jax.vjp(lambda params: varying(params, AXES), params)
    given: dict[str, Any] = {
        "graphdef": graphdef,
        "shards": shards,
        "totals": totals,
        "weights": weights,
        "with_mass": with_mass,
    }
    of_rows = functools.partial(loss_fn, **given)
    grad_fn = functools.partial(jax.grad(of_rows, has_aux=True), params)
    if accumulate == 1:
        gradients, sums = grad_fn(batch)
    else:
        gradients, sums = _sum_over(grad_fn, params, micro_batches(batch, accumulate))
    return sum_gradients(gradients)[0], sums | totals


def loss_fn(
    params: dict[str, Any],
    batch: Batch,
    graphdef: nnx.GraphDef,
    shards: Shards,
    totals: Totals,
    *,
    weights: Weights | None = None,
    budget: BudgetMode | None = None,
    detail: Literal["sums", "tokens"] = "sums",
    with_mass: Bool[Array, ""] | bool = True,
) -> tuple[Float[Array, ""], Metrics]:
    """The loss of some rows, and the sums that it is made of: `nll`, -log p of the targets in nats, and `statistics`.

    Args:
      totals: of the whole batch that the rows are of.
      weights: of the losses that layers add; None: they are left out.
      detail: `tokens` adds how budgets go with losses to the statistics (AA-25).
      with_mass: whether they hold how attention is divided; else they hold 0.
    """
    inputs = (batch[name] for name in ("tokens", "segment_ids", "positions"))
    logits, statistics = merge(graphdef, params)(
        *inputs, budget=budget, detail=detail, with_mass=with_mass, shards=shards
    )
    if detail == "tokens":
        statistics = beside_loss(statistics, logits, batch, shards)
    targets, counts = (shards.part(batch[name], TOKENS) for name in ("targets", "loss_mask"))
    # One-hot labels are fused away; the gradient of looking labels up by index is a scatter into all logits.
    labels = jax.nn.one_hot(targets, logits.shape[-1])
    nll = optax.softmax_cross_entropy(logits.astype(jnp.float32), labels)
    nll, statistics = all_reduce(jnp.sum(nll * counts)), over_all_devices(statistics)
    loss = nll / jnp.maximum(totals["count"], 1)
    if weights is not None and not statistics.keys().isdisjoint(LOSSES):
        loss += auxiliary_loss(weights, statistics) / jnp.maximum(totals["tokens"], 1)
    return loss, {"nll": nll, "statistics": statistics}


def batch_totals(batch: Batch, shards: Shards, byte_lengths: Int[np.ndarray, "V"]) -> Totals:
    """Targets that count, the bytes of text that they stand for, and tokens that are not padding, of all devices."""
    mask, targets, segment_ids = (shards.part(batch[name], TOKENS) for name in ("loss_mask", "targets", "segment_ids"))
    sums = {"count": mask, "bytes": jnp.asarray(byte_lengths)[targets] * mask, "tokens": segment_ids > 0}
    return {name: all_reduce(x.sum()) for name, x in sums.items()}


def micro_batches(batch: Batch, accumulate: int) -> dict[str, Int[Array, "n rows L"]]:
    """Every n-th row together: neighbouring rows lie on one device, so each micro-batch is spread over all devices."""
    return jax.tree.map(lambda rows: rows.reshape(-1, accumulate, rows.shape[-1]).swapaxes(0, 1), batch)


def _sum_over(
    grad_fn: Callable[[Batch], tuple[dict[str, Any], Metrics]],
    params: dict[str, Any],
    batches: dict[str, Int[Array, "n rows L"]],
) -> tuple[dict[str, Any], Metrics]:
    """Gradients and sums of all micro-batches, with one of them in memory at a time."""
    first = jax.tree.map(lambda rows: rows[0], batches)
    _, sums = jax.eval_shape(grad_fn, first)
    # Gradients are divided as parameters are; sums are the same everywhere.
    zeros = jax.tree.map(jnp.zeros_like, params), jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), sums)

    def body(total: Any, rows: Batch) -> tuple[Any, None]:
        (total_gradients, total_sums), (gradients, sums) = total, grad_fn(rows)
        added = {
            "nll": total_sums["nll"] + sums["nll"],
            "statistics": combine(total_sums["statistics"], sums["statistics"]),
        }
        return (jax.tree.map(jnp.add, total_gradients, gradients), added), None

    return jax.lax.scan(body, zeros, batches)[0]
