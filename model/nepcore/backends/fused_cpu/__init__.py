"""The ``fused-cpu`` backend. Needs numba, which is optional: importing this package without it is an ImportError."""

from __future__ import annotations

from .backend import FusedCPU, is_compiled

__all__ = ["FusedCPU", "is_compiled"]
