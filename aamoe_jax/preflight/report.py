"""Summaries as text: one table over slices, the parts of one slice, and what to do where a program is too big."""

from __future__ import annotations

import re
from collections.abc import Sequence

from aamoe_jax.config import ExperimentConfig
from aamoe_jax.markdown import table
from aamoe_jax.preflight.buffers import Buffer
from aamoe_jax.preflight.closed_form import OVER_SCHEDULE
from aamoe_jax.preflight.hardware import GIB
from aamoe_jax.preflight.summary import Summary

MODEL_NOTE = (
    "Memory, products, bytes and collectives are read from the compiler's program. Times are modelled, not measured: "
    f"each limit at its peak, kernels by {OVER_SCHEDULE} times their committed schedules with all budgets spent, in "
    "tiles as full as pairs that are spread evenly make them, `best` where all overlap, `step` where nothing does; "
    "MFU, tokens and days go by `step`, the second MFU by `best`. Sorts, gathers and vector work are in no limit."
)
OVERVIEW = ["topology", "chips", "mesh d f r t", "memory GiB", "of", "compute ms", "HBM ms", "ICI ms", "DCN ms"]
OVERVIEW += ["best ms", "step ms", "MFU", "at best", "tokens/s/chip", "days/10¹²", "bound"]
PASSES = (("rematted_computation", "recomputed"), ("transpose(jvp", "backward"), ("jvp(", "forward"))


def overview(summaries: Sequence[Summary]) -> str:
    """One row per slice."""
    return table(OVERVIEW, [overview_row(summary) for summary in summaries])


def overview_row(summary: Summary) -> list[str]:
    """The cells of a slice under OVERVIEW."""
    memory = [f"{summary.memory.peak / GIB:.1f}", f"{summary.memory.limit / GIB:.1f}"]
    mesh = " ".join(str(size) for size in summary.mesh.values())
    start = [summary.topology, f"{summary.chips:.0f}", mesh, *memory]
    if not summary.fits:
        return [*start, *[""] * 10, "too big"]
    times = (*summary.limits.values(), summary.best_seconds, summary.step_seconds)
    return [
        *start,
        *(f"{1e3 * seconds:.1f}" for seconds in times),
        f"{summary.mfu(summary.step_seconds):.1%}",
        f"{summary.mfu(summary.best_seconds):.1%}",
        f"{summary.tokens_per_second_per_chip:,.0f}",
        f"{summary.days_per_trillion:,.1f}",
        summary.bound,
    ]


def details(summary: Summary) -> str:
    """Memory by kind, the biggest buffers, FLOPs, kernels and collectives of one device."""
    parts = [f"### {summary.topology}, {summary.mode}", _memory(summary), biggest(summary.buffers)]
    if summary.network:
        parts.append(_collectives(summary))
    return "\n\n".join([*parts, _flops(summary)])


def _memory(summary: Summary) -> str:
    kinds = ("arguments", "output", "temporaries", "code", "peak", "aliased")
    sizes = [f"{getattr(summary.memory, kind) / GIB:.2f}" for kind in kinds]
    return table([f"{kind} GiB" for kind in kinds], [sizes])


def biggest(buffers: Sequence[Buffer]) -> str:
    """The buffers with their names."""
    rows = [[f"{buffer.bytes / GIB:.2f}", buffer.kind, buffer.shape, readable(buffer)] for buffer in buffers]
    return table(["GiB", "kind", "shape", "what"], rows)


def _collectives(summary: Summary) -> str:
    rows = [
        [
            part.collective.kind,
            ", ".join(part.collective.axes),
            f"{part.collective.group}",
            f"{part.collective.count}",
            f"{part.collective.sent / GIB:.3f}",
            f"{1e3 * part.seconds:.2f}",
            f"{1e3 * part.dcn_seconds:.2f}",
        ]
        for part in summary.network
    ]
    return table(["collective", "axes", "devices", "per step", "GiB sent", "ICI ms", "DCN ms"], rows)


def _flops(summary: Summary) -> str:
    teras = {
        "model": summary.model_flops,
        "spent": summary.spent_flops,
        "products": summary.product_flops,
        "products, in passes": summary.pass_flops,
        "kernels": summary.kernel_flops,
        "compiler's": summary.compiler_flops,
    }
    counted = ", ".join(f"{kernel.name} x {kernel.times}" for kernel in summary.kernels) or "none"
    return table([f"{name} TFLOP" for name in teras], [[_tera(value) for value in teras.values()]]) + (
        f"\n\nKernels: {counted}. Compiled in {summary.compile_seconds:.0f} s."
    )


def _tera(flops: int | float) -> str:
    return f"{flops / 1e12:.3f}" if flops else "not asked"


def readable(buffer: Buffer) -> str:
    """A parameter by its path; a value by the pass that makes it and the operation."""
    source = buffer.source.replace("\\'", "'")
    if buffer.kind == "argument" and source:
        return re.sub(r"\['?([^'\]]+)'?\]", r".\1", source)
    passes = [name for mark, name in PASSES if mark in source]
    operation = source.rsplit("/", 1)[-1] or buffer.name
    return f"{passes[0]}: {operation}" if passes else operation


def too_big(summary: Summary, config: ExperimentConfig) -> str:
    """What breaks the limit, and what would help, with numbers; those of what would help are estimates."""
    memory = summary.memory
    over = (memory.peak - memory.limit) / GIB
    said = f" The compiler: {summary.refusal.splitlines()[0]}" if summary.refusal else ""
    lines = [
        f"{summary.topology}: needs {memory.peak / GIB:.1f} GiB a device, {over:.1f} GiB more than the "
        f"{memory.limit / GIB:.2f} GiB there are ({memory.arguments / GIB:.1f} arguments, "
        f"{memory.temporaries / GIB:.1f} temporaries).{said}",
        "The biggest buffers:",
        *(f"  {buffer.bytes / GIB:6.2f} GiB  {buffer.shape}  {readable(buffer)}" for buffer in summary.buffers[:5]),
        "What to change:",
        *(f"  {line}" for line in advice(summary, config)),
    ]
    return "\n".join(lines)


def advice(summary: Summary, config: ExperimentConfig) -> list[str]:
    """One line per remedy that applies, the one that saves most first."""
    training, mesh, memory = config.training, summary.mesh, summary.memory
    micro = training.batch_size // training.accumulate
    rows = micro // (mesh["data"] * mesh["fsdp"])
    half = memory.temporaries / 2
    kept = sum(buffer.bytes for buffer in summary.buffers if _kept_by_layers(buffer, config))
    remedies: list[tuple[float, str]] = []
    if config.model.remat != "full" and summary.mode == "train":
        remedies.append((kept, "ModelConfig.remat = 'full': blocks are computed again, their values not kept"))
    if rows > 1 and summary.mode == "train":
        text = f"TrainingConfig.accumulate = {2 * training.accumulate}: {rows // 2} instead of {rows} rows at a time"
        remedies.append((half, text))
    if rows == 1:
        text = f"MeshConfig.resource = {2 * mesh['resource']}: the tokens of a row on twice as many devices; "
        remedies.append((half, f"{text}TrainingConfig.batch_size = {training.batch_size // 2} keeps fsdp even"))
    if mesh["data"] > 1:
        text = f"MeshConfig.data = {mesh['data'] // 2}, fsdp = {2 * mesh['fsdp']}: parameters in twice as many parts"
        remedies.append((memory.arguments / 2, text))
    text = "twice the devices along fsdp: half of the parameters and of the optimizer on each"
    remedies.append((memory.arguments / 2, text))
    remedies.sort(key=lambda remedy: -remedy[0])
    return [f"{text} (about {saved / GIB:.1f} GiB less)" for saved, text in remedies if saved > 0]


def _kept_by_layers(buffer: Buffer, config: ExperimentConfig) -> bool:
    """Whether it holds a value of every period of the stack, for the backward pass."""
    periods = config.model.periods
    return buffer.kind == "temporary" and re.search(rf"\[{periods},", buffer.shape) is not None
