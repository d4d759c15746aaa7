"""Rows gathered by the threads of a Hopper: asynchronous copies of 16 bytes, straight into swizzled shared memory.

Hopper's copy engine cannot gather, and JAX has `cp.async` for contiguous blocks alone, so that this is in Mosaic GPU's
own terms. Which rows are wanted is read ahead, into registers: `load_tokens`, then `start_rows`, then `wait`.
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


def load_tokens(token, d: int, dtype: DTypeLike) -> Int[Array, "n"]:
    """For every chunk of t rows of d numbers, row after row, the token of its row, in registers.

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
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        first = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(token))
        found = []
        for start in range(0, number // chunks, THREADS // chunks):
            offset = arith.extui(i64, _value((_thread() // chunks + start) * 4))
            place = llvm.inttoptr(llvm.PointerType.get(1), arith.addi(first, offset))
            found.append(llvm.load(ir.VectorType.get((1,), i32), place))
        return mgpu.FragmentedArray(_registers=np.array(found, object), _layout=layout.to_mgpu(), _is_signed=True)

    return load(token)


def start_rows(source, tokens: Int[Array, "n"], column: Int[Array, ""], target) -> None:
    """Starts the copies of a warpgroup: row i of the target is source[token[i], column : column + d].

    Args:
      source: [T, W] of 16 bits, in global memory.
      tokens: of `load_tokens`.
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
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        row, chunk = _thread() // chunks, _thread() % chunks
        first_target = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(target))
        first_source = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(source))
        in_row = arith.muli(arith.extui(i64, _value(column)), mgpu.c(item, i64))
        in_row = arith.addi(in_row, arith.extui(i64, _value(chunk * CHUNK)))
        for turn, token in enumerate(tokens.registers.flat):
            token = vector.extract(token, dynamic_position=[], static_position=[0])
            place = arith.addi(in_row, arith.muli(arith.extui(i64, token), mgpu.c(width * item, i64)))
            offset = swizzled_offset(row, chunk, lines) + turn * at_once * lines * LINE
            operands = arith.addi(first_target, _value(offset)), arith.addi(first_source, place)
            _assembly(f"cp.async.cg.shared.global [$0], [$1], {CHUNK};", *operands, kinds="r,l,")

    start(source, tokens, column, target)


def swizzled_offset(row, chunk, lines: int):
    """Bytes from the start of a matrix in swizzled shared memory to a chunk of a row of so many lines: 8 rows of a line
    are together, and the chunks of a line are in the order of their number xor the row's."""
    in_group, in_line = row % 8, chunk % (LINE // CHUNK)
    together = (row // 8) * lines + chunk // (LINE // CHUNK)
    return together * (8 * LINE) + in_group * LINE + (in_line ^ in_group) * CHUNK


def wait() -> None:
    """Until the rows whose copies this warpgroup has started are there, for the tensor cores too."""

    @plgpu.inline_mgpu()
    def inline(_):
        _assembly("cp.async.wait_all;")

    inline()
    plgpu.commit_smem()


def _thread() -> mgpu.FragmentedArray:
    """Its number in the warpgroup."""
    return mgpu.FragmentedArray.splat(mgpu.thread_idx(), (), is_signed=False) % THREADS


def _value(scalar: mgpu.FragmentedArray) -> ir.Value:
    return scalar.registers.item()


def _assembly(text: str, *operands: ir.Value, kinds: str = "") -> None:
    nothing = ir.Type.parse("!llvm.void")
    llvm.inline_asm(nothing, operands, text, kinds + "~{memory}", has_side_effects=True)
