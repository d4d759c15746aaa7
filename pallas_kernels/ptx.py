"""Read what the compilers made of a Mosaic GPU kernel: registers, spills, shared memory, and the instructions of tensor
core and copy engine.

`aot.compile_apart("h200", ..., dump_to=folder)` leaves the notes that are read here; a kernel is found by the name of
its `plgpu.kernel`.
"""

import re
from pathlib import Path
from typing import NamedTuple

_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_LAUNCH = re.compile(r"threads in \(%c(\d+), .*? dynamic_shared_memory_size %c(\d+)_i32")
_TARGET = re.compile(r"^\.target (\S+)", re.MULTILINE)
_TMA_LOADS = re.compile(r"cp\.async\.bulk\.(?:tensor\.\dd\.)?shared::(?:cluster|cta)\.global(?!\.tile::gather)")
_ALLOCATED = re.compile(r"tcgen05\.alloc\S*\s+\[[^]]*\], (%r\d+);")


class Kernel(NamedTuple):
    """One kernel as the GPU runs it. Instructions are counted in the text: those of a loop once."""

    target: str  # sm_90a: wgmma exists there alone; sm_100a: tcgen05
    registers: int  # of a thread; 65536 a multiprocessor
    stack_bytes: int  # of a thread, in local memory
    spill_bytes: int  # stored and loaded for want of registers
    wgmma: int
    tcgen05_mma: int
    tcgen05_ld: int
    tma_loads: int
    tma_gathers: int  # of four rows each
    tma_stores: int
    row_copies: int  # of 16 bytes, by every thread
    tensor_columns: int  # of tensor memory, of a block; 512 are there
    threads: int  # of a block
    shared_bytes: int  # of a block; 227 KiB are there


def read(folder: Path, kernel: str) -> Kernel:
    """The kernel called `kernel` from the notes in `folder`."""
    endings = "ptx", "ptxas", "mlir-passes.log"
    return parse(*(_only(folder, kernel, ending).read_text(encoding="utf-8") for ending in endings))


def parse(ptx: str, ptxas: str, passes: str) -> Kernel:
    """From the assembly, from ptxas's own words about it (ptxas -v), and from the program that launches it."""
    threads, shared = map(int, _LAUNCH.findall(passes)[0])
    stack, stores, loads = map(int, _SPILLS.findall(ptxas)[0])
    return Kernel(
        target=_TARGET.findall(ptx)[0],
        registers=int(_REGISTERS.findall(ptxas)[0]),
        stack_bytes=stack,
        spill_bytes=stores + loads,
        wgmma=ptx.count("wgmma.mma_async"),
        tcgen05_mma=ptx.count("tcgen05.mma."),
        tcgen05_ld=ptx.count("tcgen05.ld."),
        tma_loads=len(_TMA_LOADS.findall(ptx)),
        tma_gathers=ptx.count("tile::gather4"),
        tma_stores=len(re.findall(r"cp\.async\.bulk\.(?:tensor\.\dd\.)?global\.shared::cta", ptx)),
        row_copies=ptx.count("cp.async.cg.shared.global"),
        tensor_columns=sum(
            int(re.findall(rf"mov\.b32\s+{register}, (\d+);", ptx)[0]) for register in _ALLOCATED.findall(ptx)
        ),
        threads=threads,
        shared_bytes=shared,
    )


def _only(folder: Path, kernel: str, ending: str) -> Path:
    found = sorted(
        path for path in folder.iterdir() if re.fullmatch(rf"{re.escape(kernel)}_\d+\.{re.escape(ending)}", path.name)
    )
    if not found:
        raise FileNotFoundError(f"{folder}: no {kernel}_*.{ending}; was the folder given to compile_apart?")
    # The same kernel compiled again leaves the same text under the next number.
    return found[-1]
