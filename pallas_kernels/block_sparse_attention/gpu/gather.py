"""Rows gathered by the threads of a Hopper: asynchronous copies of 16 bytes, straight into swizzled shared memory.

Hopper's copy engine cannot gather, and JAX has `cp.async` for contiguous blocks alone, so that this is in Mosaic GPU's
own terms. Which rows are wanted is read ahead, into registers: `tokens`, then `rows`, then `wait`.
"""

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Int

THREADS = 128  # of a warpgroup
LINE = 128  # bytes of a row that are swizzled together, in groups of 8 rows
CHUNK = 16  # bytes of a copy


def tokens(token, d: int, dtype: DTypeLike) -> Int[Array, "n"]:
    """For each of the chunks of t rows of d numbers, row after row, which row it is of.

    Args:
      token: [t] of int32, in global memory.
    """
    chunks = d * jnp.dtype(dtype).itemsize // CHUNK  # of a row
    number = token.shape[0] * chunks
    layout = plgpu.Layout.WG_STRIDED((number,), vec_size=1)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((number,), jnp.int32, layout=layout)
    )
    def load(_, token):
        i32, i64 = _integers()
        row = arith.divui(_thread(), mgpu.c(chunks, i32))
        first = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(token))
        found = []
        for start in range(0, number // chunks, THREADS // chunks):
            offset = arith.extui(i64, arith.muli(arith.addi(row, mgpu.c(start, i32)), mgpu.c(4, i32)))
            place = llvm.inttoptr(llvm.PointerType.get(1), arith.addi(first, offset))
            found.append(llvm.load(ir.VectorType.get((1,), i32), place))
        return mgpu.FragmentedArray(_registers=np.array(found, object), _layout=layout.to_mgpu(), _is_signed=True)

    return load(token)


def rows(source, tokens: Int[Array, "n"], column: Int[Array, ""], target) -> None:
    """Starts the copies of a warpgroup: row i of the target is source[token[i], column : column + d].

    Args:
      source: [T, W] of 16 bits, in global memory.
      target: [t, d], swizzled shared memory.
    """
    d, width = target.shape[1], source.shape[1]
    item = jnp.dtype(source.dtype).itemsize
    chunks, lines = d * item // CHUNK, d * item // LINE  # of a row
    at_once = THREADS // chunks  # rows: whole groups of 8, so that a thread has the same place in each
    swizzled = plgpu.RefType((plgpu.TilingTransform((8, LINE // item)), plgpu.SwizzleTransform(LINE)))
    given = plgpu.Layout.WG_STRIDED(tokens.shape, vec_size=1)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), given, plgpu.Layout.WG_SPLAT, swizzled))
    def start(_, source, tokens, column, target):
        i32, i64 = _integers()
        number = lambda x: mgpu.c(x, i32)  # noqa: E731
        row, chunk = arith.divui(_thread(), number(chunks)), arith.remui(_thread(), number(chunks))
        in_group, in_line = arith.remui(row, number(8)), arith.remui(chunk, number(LINE // CHUNK))
        group, line = arith.divui(row, number(8)), arith.divui(chunk, number(LINE // CHUNK))

        def sum_of_products(*pairs):
            total = number(0)
            for x, by in pairs:
                total = arith.addi(total, arith.muli(x, number(by)))
            return total

        first_target = arith.addi(
            llvm.ptrtoint(i32, mgpu.utils.memref_ptr(target)),
            sum_of_products(
                (group, lines * 8 * LINE), (line, 8 * LINE), (in_group, LINE), (arith.xori(in_line, in_group), CHUNK)
            ),
        )
        in_row = arith.extui(i64, sum_of_products((column.registers.item(), item), (chunk, CHUNK)))
        first_source = arith.addi(llvm.ptrtoint(i64, mgpu.utils.memref_ptr(source)), in_row)
        for turn, token in enumerate(tokens.registers.flat):
            token = vector.extract(token, dynamic_position=[], static_position=[0])
            place = arith.muli(arith.extui(i64, token), mgpu.c(width * item, i64))
            here = arith.addi(first_target, number(turn * at_once * lines * LINE))
            copy = f"cp.async.cg.shared.global [$0], [$1], {CHUNK};"
            _assembly(copy, here, arith.addi(first_source, place), kinds="r,l")

    start(source, tokens, column, target)


def wait() -> None:
    """Until the rows whose copies this warpgroup has started are there, for the tensor cores too."""

    @plgpu.inline_mgpu()
    def inline(_):
        _assembly("cp.async.wait_all;")

    inline()
    plgpu.commit_smem()


def _integers() -> tuple[ir.Type, ir.Type]:
    return ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)


def _thread() -> ir.Value:
    """Of the warpgroup."""
    return arith.remui(mgpu.thread_idx(), mgpu.c(THREADS, _integers()[0]))


def _assembly(text: str, *operands: ir.Value, kinds: str = "") -> None:
    llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, kinds, has_side_effects=True)
