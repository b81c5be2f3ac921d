"""Kernels run in Triton's interpreter where there is no GPU; it is chosen when Triton is imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
