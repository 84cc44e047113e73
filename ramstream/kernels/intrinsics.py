"""What numba lacks, as LLVM: bits of floats, pointers, popcounts, and 64 comparisons packed into one word.

With NUMBA_DISABLE_JIT=1 the same in Python, so that tests can trace the kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, types
from numba.extending import intrinsic

_intrinsic: Callable[[Callable[..., Any]], Any] = intrinsic

if config.DISABLE_JIT:

    def pointer(address: Any) -> Any:
        return ctypes.c_void_p(int(address))

    def prefetch(address: Any) -> None:
        pass

    def run_core(core: Any, rows: Any, numbers: Any, out: Any, n: Any) -> None:
        core(rows, numbers, out, n)

    def bits_of(value: Any) -> Any:
        return value.view(np.uint32 if value.itemsize == 4 else np.uint64)

    def float_of(value: Any) -> Any:
        return value.view(np.float32 if value.itemsize == 4 else np.float64)

    def popcount(word: Any) -> Any:
        return int(word).bit_count()

    def nonzero(row: Any, word: Any) -> Any:
        return np.packbits(row[64 * word : 64 * word + 64] != 0, bitorder="little").view(np.uint64)[0]

    def below_zero(row: Any, word: Any) -> Any:
        return np.packbits(row[64 * word : 64 * word + 64] < 0, bitorder="little").view(np.uint64)[0]

    def above_zero(row: Any, word: Any) -> Any:
        return np.packbits(row[64 * word : 64 * word + 64] > 0, bitorder="little").view(np.uint64)[0]

else:

    @_intrinsic
    def pointer(context: Any, address: Any) -> Any:
        """An integer address as a void pointer."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.voidptr(address), generate

    @_intrinsic
    def prefetch(context: Any, address: Any) -> Any:
        """Ask for the cache line at an integer address, which need not exist."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            place = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
            number = ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
            function = builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind)
            builder.call(function, [place, number(0), number(2), number(1)])
            return context.get_dummy_value()

        return types.void(address), generate

    @_intrinsic
    def run_core(context: Any, core: Any, rows: Any, numbers: Any, out: Any, n: Any) -> Any:
        """Call the core at an integer address (`ramstream.kernels.cores`) on the data of three arrays."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = [
                context.make_array(kind)(context, builder, array).data
                for kind, array in zip(signature.args[1:4], arguments[1:4], strict=True)
            ]
            kind = ir.FunctionType(ir.VoidType(), [*(pointer.type for pointer in data), ir.IntType(64)])
            builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [*data, arguments[4]])
            return context.get_dummy_value()

        return types.void(core, rows, numbers, out, types.int64), generate

    @_intrinsic
    def bits_of(context: Any, value: Any) -> Any:
        """The bits of a float as an unsigned integer."""
        return _bitcast({types.float32: types.uint32, types.float64: types.uint64}[value], value)

    @_intrinsic
    def float_of(context: Any, value: Any) -> Any:
        """The float with these bits."""
        return _bitcast({types.uint32: types.float32, types.uint64: types.float64}[value], value)

    def _bitcast(result: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

        return result(value), generate

    @_intrinsic
    def popcount(context: Any, word: Any) -> Any:
        """Bits set in a uint64."""
        return types.int64(word), lambda context, builder, signature, arguments: builder.ctpop(arguments[0])

    def _comparison(operator: str, unordered: bool) -> Any:
        def comparison(context: Any, row: Any, word: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
                first = builder.gep(data, [builder.mul(arguments[1], arguments[1].type(64))])
                element = context.get_value_type(signature.args[0].dtype)
                vector = ir.VectorType(element, 64)
                values = builder.load(builder.bitcast(first, vector.as_pointer()))
                values.align = signature.args[0].dtype.bitwidth // 8
                compare = builder.fcmp_unordered if unordered else builder.fcmp_ordered
                return builder.bitcast(compare(operator, values, vector(None)), ir.IntType(64))

            return types.uint64(row, types.int64), generate

        return intrinsic(comparison)

    # Elements 64 w .. 64 w + 63 of a row compared with 0, one bit each, as one vector comparison.
    nonzero, below_zero, above_zero = (
        _comparison(*how) for how in (("!=", True), ("<", False), (">", False))
    )
