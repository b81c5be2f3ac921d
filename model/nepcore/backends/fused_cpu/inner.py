"""Decorators of the functions that only compiled functions call."""

from __future__ import annotations

from typing import Any

import numba
from numba import extending

_njit: Any = numba.njit

inner = _njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""Compile a function. A wrapper for calls from Python would unpack every argument, here tuples of dozens of arrays, and
take longer to compile than the function itself."""

intrinsic: Any = extending.intrinsic
"""A function written as LLVM instructions. What it takes and gives the type checker cannot know."""
