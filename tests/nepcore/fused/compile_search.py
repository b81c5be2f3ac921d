"""Compile the kernels of the search and of the sums ahead of time, without a GPU: prints a line a kernel.

python tests/nepcore/fused/compile_search.py cuda:90 hip:gfx942
"""

from __future__ import annotations

import sys
import time
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nepcore.backends.fused import cells, search, skin, totals

KINDS = {"f64": "*fp64", "f32": "*fp32", "i32": "*i32", "u8": "*u8"}

KERNELS: list[tuple[Any, dict[str, str], dict[str, Any], int]] = [
    (
        cells.prepare_cells,
        {"cells": "f64", "positions": "f64", "frames": "f64", "scaled": "f32", "cutoff": "fp32"},
        {
            "COARSEST": cells.COARSEST,
            "MOST_CANDIDATES": cells.MOST_CANDIDATES,
            "ELSEWHERE": 2,
            "FRAME": 16,
            "SPAN": 8,
            "BLOCK": 128,
        },
        1,
    ),
    (
        cells.place_atoms,
        {"positions": "f64", "numbers": "u8", "frames": "f64"},
        {"SORT": True, "FRAME": 16, "BLOCK": 128, "WIDTH": 64},
        4,
    ),
    (
        search.find_neighbors,
        {"scaled": "f32", "radial_square": "fp32", "angular_square": "fp32"},
        {"SORTED": True, "SPAN": 8, "COINCIDENT": 1, "SAME_SQUARE": 1e-10, "A": 4, "C": 64},
        4,
    ),
    (search.find_reverse, {}, {"IMAGES": True, "A": 4, "G": 16, "C": 16}, 4),
    (search.find_reverse, {}, {"IMAGES": False, "A": 4, "G": 16, "C": 16}, 4),
    (
        skin.refresh,
        {"positions": "f64", "frame": "f64", "scaled": "f32", "limit_square": "fp32"},
        {"CHECK": True, "BLOCK": 256},
        4,
    ),
    (skin.find_within_skin, {"scaled": "f32", "radial_square": "fp32", "angular_square": "fp32"}, {"C": 64}, 1),
    (skin.sort_row, {}, {"C": 32, "W": 64}, 1),
    (
        skin.pick_in_range,
        {"scaled": "f32", "radial_square": "fp32", "angular_square": "fp32"},
        {"COINCIDENT": 1, "SAME_SQUARE": 1e-10, "A": 4, "C": 32},
        4,
    ),
    (
        totals.sum_structures,
        {"energy": "f64", "virials": "f32", "total": "f64", "virial": "f64"},
        {"VIRIALS": True, "BLOCK": 128},
        4,
    ),
    (
        totals.sum_blocks,
        {"energy": "f64", "virials": "f32", "partial": "f64"},
        {"VIRIALS": True, "BLOCK": 1024},
        4,
    ),
    (totals.sum_partial, {"partial": "f64", "total": "f64"}, {"BLOCK": 64}, 4),
    (totals.copy_words, {}, {"BLOCK": 512}, 4),
    (totals.put_back, {"source": "f32", "target": "f32"}, {"W": 3, "PADDED": 4, "BLOCK": 256}, 4),
]
"""Kernel, kinds of its arguments other than pointers to int32 (and int32 for names that look like numbers),
constants, warps."""

NUMBERS = {"S", "N", "MR", "MA", "MS", "na", "nb", "nc", "wide_a", "wide_b", "wide_c", "periodic", "blocks"}


def main() -> None:
    for name in sys.argv[1:]:
        backend, arch = name.split(":")
        target = GPUTarget(backend, int(arch), 32) if backend == "cuda" else GPUTarget(
            backend, arch, 32 if arch.startswith("gfx1") else 64
        )  # fmt: skip
        for kernel, kinds, constants, warps in KERNELS:
            signature = {}
            for argument in kernel.arg_names:
                if argument in constants:
                    signature[argument] = "constexpr"
                elif argument in NUMBERS:
                    signature[argument] = "i32"
                else:
                    kind = kinds.get(argument, "i32")
                    signature[argument] = KINDS.get(kind, kind)
            begun = time.perf_counter()
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            out = triton.compile(source, target=target, options={"num_warps": warps})
            assert "ptx" in out.asm or "hsaco" in out.asm
            print(f"{name} {kernel.__name__} {time.perf_counter() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main()
