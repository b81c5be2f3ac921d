"""The decorator of functions that only compiled functions call."""

from __future__ import annotations

from numba import njit

# A wrapper for calls from Python unpacks every argument, here tuples of dozens of arrays: it would take longer to
# compile than the function itself.
inner = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
