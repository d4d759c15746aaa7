"""Does repetition need less compute? What tokens spend where the text repeats itself, against where it is new (AA-38).

Token i is *copied* (at n) when the n tokens that end with it stand earlier in its document too, as far back as its row
shows; occurrences may overlap. The model can know this at token i, so what is compared is the budget spent there, and
the loss of the next token, which that budget serves. Other tokens are *novel*; the first n of a document cannot be
copied and are left out.

Copied tokens differ from novel ones in more than that: more of them are blanks, and they stand later. So there is a
second comparison, with novel tokens of the same id at a similar position (the same power of two).

Shapes: N observed tokens, `layers` the AA-MoE layers in order, b rows, L tokens per row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import optax
from jaxtyping import Bool, Float, Int

from aamoe_jax.analysis.inspection import CONTEXT, EXPERT, Inspection, aamoe_layers, read, slot_kinds
from aamoe_jax.config import ConfigError, ModelConfig
from aamoe_jax.sharding import on_host

NGRAMS = (4, 8, 16, 32)

Batch = dict[str, Int[np.ndarray, "b L"]]


@dataclasses.dataclass(frozen=True)
class Ledger:
    """What every observed token spent."""

    token: Int[np.ndarray, "N"]
    position: Int[np.ndarray, "N"]
    """In the document, as far back as the row shows it."""
    cluster: Int[np.ndarray, "N"]
    """Tokens of one cluster are not independent: a document, or a chunk of a single passage."""
    repeat: Int[np.ndarray, "N"]
    """The largest n of NGRAMS at which the token is copied; 0 where it is novel at all of them."""
    nats: Float[np.ndarray, "N"]
    """Loss of the next token."""
    spent: Int[np.ndarray, "layers N"]
    context: Int[np.ndarray, "layers N"]
    """Routed chunks among what was spent."""
    expert: Int[np.ndarray, "layers N"]


def repeats(tokens: Int[np.ndarray, "L"], n: int) -> Bool[np.ndarray, "L"]:
    """Whether the n tokens that end with each token stand earlier in `tokens` too."""
    data = np.ascontiguousarray(tokens, np.int32)
    flags = np.zeros(len(data), bool)
    seen = set()
    for end in range(n, len(data) + 1):
        gram = data[end - n : end].tobytes()
        flags[end - 1] = gram in seen
        seen.add(gram)
    return flags


def longest_repeat(tokens: Int[np.ndarray, "L"], segment_ids: Int[np.ndarray, "L"]) -> Int[np.ndarray, "L"]:
    """The largest n of NGRAMS at which each token is copied, 0 for none; documents of a row know nothing of each
    other."""
    longest = np.zeros(len(tokens), np.int32)
    for segment in np.unique(segment_ids[segment_ids > 0]):
        inside = segment_ids == segment
        # What repeats 32 tokens repeats the last 16 of them: larger n overwrite smaller ones.
        for n in sorted(NGRAMS):
            longest[inside] = np.where(repeats(tokens[inside], n), n, longest[inside])
    return longest


def observe(
    config: ModelConfig,
    params: dict[str, Any],
    batches: Sequence[Batch],
    *,
    eos_id: int,
    max_batches: int = 0,
    budget_scale: float = 1.0,
) -> Ledger:
    """What the tokens of held-out batches spend under causal budgets.

    Args:
      batches: rows in the order of the text (`data.evaluation_batches`).
      eos_id: ends documents, which are the clusters.
      max_batches: that many, evenly spread over the text; 0: all.

    Raises:
      ConfigError: the model has no AA-MoE layer, or no token of the batches has a next one.
    """
    aamoe_layers(config)
    wanted = min(max_batches or len(batches), len(batches))
    parts, documents = [], 0
    for index in np.unique(np.linspace(0, len(batches) - 1, wanted).astype(int)):
        batch = batches[int(index)]
        ends, kept = batch["tokens"].reshape(-1) == eos_id, batch["loss_mask"].reshape(-1) > 0
        logits, statistics = read(config, params, batch, "resources", budget_scale)
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        nats, spent, resource = on_host((nats, statistics["spent"], statistics["resource"]))
        kind = slot_kinds(config.aamoe, spent, resource, spent.shape[-1])
        repeat = np.stack([longest_repeat(*row) for row in zip(batch["tokens"], batch["segment_ids"], strict=True)])
        per_token = batch["tokens"], batch["positions"], documents + np.cumsum(ends) - ends, repeat, nats
        per_layer = spent, (kind == CONTEXT).sum(-1), (kind == EXPERT).sum(-1)
        fields = [x.reshape(-1)[kept] for x in per_token]
        parts.append(fields + [x.reshape(len(x), -1)[:, kept] for x in per_layer])
        documents += int(ends.sum())
    ledger = Ledger(*(np.concatenate(found, axis=-1) for found in zip(*parts, strict=True)))
    if not len(ledger.token):
        raise ConfigError("copies: there is nothing to predict in this split; prepare a larger dataset")
    return ledger


def ledger_of(inspection: Inspection) -> Ledger:
    """The ledger of one passage; its chunks are the clusters. The last token has no next one and is left out."""
    length = len(inspection.tokens)
    return Ledger(
        token=inspection.tokens[:-1],
        position=np.arange(length - 1),
        cluster=np.arange(length - 1) // inspection.chunk_size,
        repeat=longest_repeat(inspection.tokens, np.ones(length, np.int32))[:-1],
        nats=inspection.bits[1:] * np.log(2),
        spent=inspection.spent[:, :-1],
        context=(inspection.kind == CONTEXT).sum(-1)[:, :-1],
        expert=(inspection.kind == EXPERT).sum(-1)[:, :-1],
    )


def compare(ledger: Ledger, n: int) -> dict[str, Any]:
    """Copied against novel tokens at one n, JSON-ready.

    Returns:
      `copied`, `novel`: `tokens`, `nats` (mean loss of the next token), and per layer `spent` (mean per token),
      `pairs_context` and `pairs_expert` (shares of what was spent). `difference`: of `spent` per layer, of their mean
      over layers `spent_mean`, and of `nats`, copied less novel, each a pair (value, standard error). `matched`: the
      same against novel tokens of the same id at a similar position, and the share of the copied ones that have such.
      Both are None where a group is empty.
    """
    eligible = ledger.position >= n
    copied = (ledger.repeat >= n) & eligible
    result = {"n": n, "copied": _group(ledger, copied), "novel": _group(ledger, eligible & ~copied)}
    similar = ledger.token * 64 + np.log2(ledger.position + 1).astype(int)
    for name, stratum in (("difference", np.zeros_like(similar)), ("matched", similar)):
        result[name] = _differences(ledger, copied, eligible, stratum)
    return result


def _group(ledger: Ledger, member: Bool[np.ndarray, "N"]) -> dict[str, Any]:
    count = int(member.sum())
    if not count:
        return {"tokens": 0}
    spent = ledger.spent[:, member].sum(-1)
    result = {"tokens": count, "nats": float(ledger.nats[member].mean()), "spent": (spent / count).tolist()}
    for kind, pairs in (("context", ledger.context), ("expert", ledger.expert)):
        result[f"pairs_{kind}"] = (pairs[:, member].sum(-1) / np.maximum(spent, 1)).tolist()
    return result


def _differences(
    ledger: Ledger, copied: Bool[np.ndarray, "N"], eligible: Bool[np.ndarray, "N"], stratum: Int[np.ndarray, "N"]
) -> dict[str, Any] | None:
    values = np.concatenate([ledger.spent, ledger.spent.mean(0, keepdims=True), ledger.nats[None]])[:, eligible]
    found = stratified_difference(values, copied[eligible], stratum[eligible], ledger.cluster[eligible])
    if found is None:
        return None
    pairs = list(zip(found.value.tolist(), found.error.tolist(), strict=True))
    return {"share": found.share, "spent": pairs[:-2], "spent_mean": pairs[-2], "nats": pairs[-1]}


@dataclasses.dataclass(frozen=True)
class Difference:
    """Means of members less means of others."""

    value: Float[np.ndarray, "v"]
    error: Float[np.ndarray, "v"]
    """Standard error, for clusters that are independent of each other; NaN where there is one cluster alone."""
    share: float
    """Members in strata that have others too; the rest is left out."""


def stratified_difference(
    values: Float[np.ndarray, "v N"],
    member: Bool[np.ndarray, "N"],
    stratum: Int[np.ndarray, "N"],
    cluster: Int[np.ndarray, "N"],
) -> Difference | None:
    """Mean over members of their value less the mean of the others in their stratum. None: nobody can be compared.

    The error is that of a sum over clusters of every token's influence on the result (linearised), which with one
    stratum and one token per cluster is the textbook's sqrt(s1^2 / n1 + s0^2 / n0).
    """
    _, stratum = np.unique(stratum, return_inverse=True)
    members, others = np.bincount(stratum, member), np.bincount(stratum, ~member)
    kept = ((members > 0) & (others > 0))[stratum]
    if not kept.any():
        return None
    share = (member & kept).sum() / member.sum()
    values, member, stratum = values[:, kept], member[kept], stratum[kept]
    _, cluster = np.unique(cluster[kept], return_inverse=True)
    clusters = cluster.max() + 1
    weight = np.where(member, 1.0, -(members / np.maximum(others, 1))[stratum]) / member.sum()
    found = []
    for value in values:
        usual = np.bincount(stratum, value * ~member, len(others)) / np.maximum(others, 1)
        residual = value - usual[stratum]
        difference = residual[member].mean()
        influence = np.bincount(cluster, weight * (residual - difference * member))
        scale = clusters / (clusters - 1) if clusters > 1 else np.nan
        found.append((difference, np.sqrt(scale * (influence**2).sum())))
    value, error = np.array(found).T
    return Difference(value, error, float(share))
