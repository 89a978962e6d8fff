"""Loads exchange.cpp, and says where it cannot run."""

import ctypes
import functools
import sys
from ctypes import POINTER, c_char_p, c_int, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path

from ...kernels.cpu.build import CppLibrary

_NUMBER = POINTER(c_uint32)
# Argument types of the C functions, in the order of exchange.cpp; tensors are addresses.
_PLAN = [
    *(c_void_p, c_void_p, *[c_int64] * 4, c_int),  # exchange, plan; U, T, N, E; same
    *(c_void_p, c_void_p, c_void_p),  # source, target, expert
    *(c_void_p, c_void_p),  # rank and slot of every expert
]
_POST_OUT = [
    *(c_void_p, c_void_p, c_void_p, c_int64),  # exchange, plan; rows, bytes of one
    *(c_void_p, c_int64, _NUMBER),  # weights, bytes of one
]
_TAKE_OUT = [
    *(c_void_p, c_uint32, c_int64, c_int64),  # exchange, message, bytes of a row and of a weight
    *(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),  # rows; source, slot, target, weight
]
_POST_BACK = [
    *(c_void_p, c_void_p, c_int64, c_void_p),  # exchange; rows, bytes of one, starts
    *(c_void_p, c_void_p, c_int64, _NUMBER),  # weights, starts of routes, bytes of one
]
_SUM_BACK = [
    *(c_void_p, c_void_p, c_uint32, c_int64, c_int64),  # exchange, plan, message; bytes
    *(c_int, c_void_p, c_void_p),  # dtype; sums, weights
]
LIBRARY = CppLibrary(
    name="moebius_exchange",
    sources=[Path(__file__).with_name("exchange.cpp")],
    flags=["-O3", "-std=c++17"],
    functions=[
        ("moebius_exchange_create", c_void_p, [c_uint64, c_int, c_int]),
        ("moebius_exchange_file", c_int, [c_void_p]),
        ("moebius_exchange_connect", c_int, [c_void_p, c_int, c_int64, c_int, c_uint64]),
        ("moebius_exchange_close", None, [c_void_p]),
        ("moebius_exchange_check", None, [c_void_p, c_int]),
        ("moebius_exchange_fault", c_char_p, [c_void_p]),
        ("moebius_exchange_bytes", c_uint64, [c_void_p]),
        ("moebius_exchange_wait", c_int, [c_void_p, c_uint32, POINTER(c_int)]),
        ("moebius_exchange_plan_words", c_int64, [c_void_p, *[c_int64] * 3, c_int]),
        ("moebius_exchange_plan", c_int, _PLAN),
        ("moebius_exchange_sent", None, [c_void_p, c_void_p, c_void_p]),
        ("moebius_exchange_post_out", c_int, _POST_OUT),
        ("moebius_exchange_sizes", c_int, [c_void_p, c_uint32, c_int64, c_int64, c_void_p]),
        ("moebius_exchange_take_out", c_int, _TAKE_OUT),
        ("moebius_exchange_post_back", c_int, _POST_BACK),
        ("moebius_exchange_sum_back", c_int, _SUM_BACK),
    ],
    otherwise="set mesh.dispatcher=dedup to do without it",
)


def reason_against() -> str | None:
    """Says why this machine cannot exchange rows through shared memory; None where it can."""
    if sys.platform != "linux":
        return f"it wants Linux (memfd, futex), and this is {sys.platform}"
    return LIBRARY.reason_against()


@functools.cache
def load_library() -> ctypes.CDLL:
    """Loads the library, compiled first if it must be.

    Raises:
        ValueError: it cannot be compiled; with the compiler's own words.
    """
    return LIBRARY.load()
