"""Arrow columns from the memory of their values, and back.

The first call of `pa.array` or `to_numpy` in a process imports pandas if it is installed, which costs
each preparing process 0.4 s. These columns have known types, so their buffers are passed directly, and
files have the same bytes. For the way back to numbers, use `np.from_dlpack`.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa


def number_column(values: np.ndarray, dtype: np.dtype) -> pa.Array:
    """Returns a column of integers; shares the memory of an array that has this dtype.

    Raises:
        OverflowError: a value does not fit.
    """
    converted = np.ascontiguousarray(values, dtype=dtype)
    if values.dtype != dtype and not np.array_equal(values, converted):
        raise OverflowError(f"values from {values.min()} to {values.max()} do not fit into {dtype}")
    arrow_type = pa.from_numpy_dtype(dtype)
    return pa.Array.from_buffers(arrow_type, len(converted), [None, pa.py_buffer(converted)])


def bool_column(values: np.ndarray) -> pa.Array:
    """Returns a column of booleans."""
    bits = np.packbits(values, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(bits)])


def bools_of(column: pa.BooleanArray) -> np.ndarray:
    """Returns the booleans of a column."""
    bits = np.frombuffer(column.buffers()[1], dtype=np.uint8)
    end = column.offset + len(column)
    return np.unpackbits(bits, count=end, bitorder="little")[column.offset :].view(bool)


def bytes_column(values: Sequence[bytes], width: int) -> pa.Array:
    """Returns a column of values of `width` bytes each.

    Raises:
        ValueError: they have another length.
    """
    data = b"".join(values)
    if len(data) != width * len(values):
        raise ValueError(f"{len(values)} values have {len(data)} bytes, not {width} each")
    return pa.Array.from_buffers(pa.binary(width), len(values), [None, pa.py_buffer(data)])


def text_column(values: Sequence[bytes]) -> pa.Array:
    """Returns a string column from UTF-8 bytes."""
    data = b"".join(values)
    buffers = [None, pa.py_buffer(_offsets([len(one) for one in values])), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.string(), len(values), buffers)


def list_column(lengths: Sequence[int], values: pa.Array) -> pa.Array:
    """Returns a column of lists of the given lengths, cut from one column."""
    return pa.ListArray.from_arrays(number_column(_offsets(lengths), np.dtype("<i4")), values)


def _offsets(lengths: Sequence[int]) -> np.ndarray:
    """Returns the start of each part, and the end of the last one."""
    ends = np.cumsum([0, *lengths], dtype=np.int64)
    if ends[-1] >= 2**31:
        raise OverflowError(
            f"a list column of {ends[-1]} values does not fit into one record batch"
        )
    return ends.astype("<i4")
