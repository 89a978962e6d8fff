"""Arrow columns made of the memory that holds their values, and back.

`pa.array` takes anything, and therefore imports pandas where that is installed, the first time that
a process calls it; so does `to_numpy`. That is 0.4 s of each process that prepares data. What is
written here has a known type, so its buffers are handed over as they are. The bytes of a file are
the same either way. (Back to numbers it is `np.from_dlpack`.)
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa


def number_column(values: np.ndarray, dtype: np.dtype) -> pa.Array:
    """Returns a column of integers; where the array is of this dtype it shares the memory.

    Raises:
        OverflowError: a value does not fit.
    """
    converted = np.ascontiguousarray(values, dtype=dtype)
    if values.dtype != dtype and not np.array_equal(values, converted):
        raise OverflowError(f"values from {values.min()} to {values.max()} as {dtype}")
    arrow_type = pa.from_numpy_dtype(dtype)
    return pa.Array.from_buffers(arrow_type, len(converted), [None, pa.py_buffer(converted)])


def bool_column(values: np.ndarray) -> pa.Array:
    """Returns a column of truth values."""
    bits = np.packbits(values, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(bits)])


def bools_of(column: pa.BooleanArray) -> np.ndarray:
    """Returns the truth values of a column."""
    bits = np.frombuffer(column.buffers()[1], dtype=np.uint8)
    end = column.offset + len(column)
    return np.unpackbits(bits, count=end, bitorder="little")[column.offset :].view(bool)


def bytes_column(values: Sequence[bytes], width: int) -> pa.Array:
    """Returns a column of `width` bytes each.

    Raises:
        ValueError: they have another length.
    """
    data = b"".join(values)
    if len(data) != width * len(values):
        raise ValueError(f"{len(values)} values have {len(data)} bytes, not {width} each")
    return pa.Array.from_buffers(pa.binary(width), len(values), [None, pa.py_buffer(data)])


def text_column(values: Sequence[bytes]) -> pa.Array:
    """Returns a column of texts that are given as UTF-8."""
    data = b"".join(values)
    buffers = [None, pa.py_buffer(_offsets([len(one) for one in values])), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.string(), len(values), buffers)


def list_column(lengths: Sequence[int], values: pa.Array) -> pa.Array:
    """Returns a column of lists, so many values each, cut from one column."""
    return pa.ListArray.from_arrays(number_column(_offsets(lengths), np.dtype("<i4")), values)


def _offsets(lengths: Sequence[int]) -> np.ndarray:
    """Returns where each of so many parts begins, and where the last one ends."""
    ends = np.cumsum([0, *lengths], dtype=np.int64)
    if ends[-1] >= 2**31:
        raise OverflowError(f"a record batch with {ends[-1]} values in a column of lists")
    return ends.astype("<i4")
