"""Compile the kernels of serving and of training for ``backend:architecture:lanes``; print their names."""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nepcore import synthetic
from nepcore.backends.fused import forward as chain
from nepcore.backends.fused.lists import Lists, Outputs
from nepcore.backends.fused.model import prepare
from nepcore.training import kernels as training

KERNELS = (
    "element_order", "radial_sums", "angular_sums", "network", "radial_weights", "angular_slopes", "radial_forces",
    "angular_forces", "angular_gather", "repulsion",
)  # fmt: skip
_KERNELS = {name: getattr(chain, name) for name in KERNELS}
TRAINING = ("radial_sums_of_element", "radial_forces_of_atoms", "radial_spread_to_element")
_TRAINING = {name: getattr(training, name) for name in TRAINING}
_TYPES = {torch.float32: "*fp32", torch.float64: "*fp64", torch.int32: "*i32", torch.int64: "*i64"}


class Recorded:
    """Stands in for a kernel, and notes how it is launched."""

    def __init__(self, kernel: Any, calls: list[Any]) -> None:
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.calls.append((self.kernel, args, options))


def launches(elements: tuple[str, ...], *, images: bool, **options: Any) -> list[Any]:
    """Kernel, arguments and options of every launch of an evaluation."""
    model = prepare(synthetic.make_model(elements, seed=1, **options), range(len(elements)), torch.device("cpu"))
    n, m = 64, 16

    def table(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    image = table(n, m) if images else None
    lists = Lists(
        images, table(n, 4), table(n), table(1, 9, dtype=torch.float32), table(1, 3), table(1, dtype=torch.float32),
        table(n, m), table(n), image, table(n, m), table(n), image, table(n, m),
    )  # fmt: skip
    outputs = Outputs(
        table(n, dtype=torch.float64), table(n, 3, dtype=torch.float32), table(n, 9, dtype=torch.float32),
        table(n, model.dim, dtype=torch.float32),
    )  # fmt: skip
    scratch = {name: table(*s, dtype=dtype) for name, (s, dtype) in chain.scratch(model, n, m, m).items()}
    calls: list[Any] = []
    for name in KERNELS:
        setattr(chain, name, Recorded(_KERNELS[name], calls))
    chain.forward(model, lists, outputs, scratch, (chain.hasty if images else chain.tiles)(model.shape))
    return calls


def training_launches(n_types: int, functions: int) -> list[Any]:
    """The same of the kernels of a training step."""
    long, short, n = torch.int64, torch.int32, 64
    pairs = training.Pairs(
        torch.zeros(n, 3), torch.zeros(n, dtype=short), torch.zeros(n, dtype=long), torch.zeros(n, dtype=short),
        torch.zeros(n, dtype=long), torch.zeros(n, dtype=long), torch.ones(n_types, n_types), functions,
    )  # fmt: skip
    calls: list[Any] = []
    for name in TRAINING:
        setattr(training, name, Recorded(_TRAINING[name], calls))
    training.radial_sums(pairs)
    training.radial_forces(pairs, torch.zeros(n, n_types * functions))
    training.radial_spread(pairs, torch.zeros(n, 3), torch.zeros(1, 9), torch.zeros(n, dtype=long))
    return calls


def compiled(kernel: Any, args: tuple[Any, ...], options: dict[str, Any], target: GPUTarget) -> Any:
    """One kernel for a target, with the arguments of a launch."""
    signature, constants, attributes = {}, {}, {}
    for parameter, value in zip(kernel.params, args, strict=True):
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
            attributes[(parameter.num,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "i32"
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=options)


def main() -> None:
    backend, architecture, lanes = sys.argv[1].split(":")
    target = GPUTarget(backend, int(architecture) if architecture.isdigit() else architecture, int(lanes))
    small = {"n_max": (2, 2), "basis_size": (3, 3), "hidden": (5,)}
    calls = launches(("Si", "C", "O", "N"), images=True, zbl="universal", l_max=2, switches=("q222", "q1111"), **small)
    calls += training_launches(2, 7) + training_launches(7, 9)
    calls += launches(("Si",), images=False, l_max=3, switches=(), **{**small, "hidden": (5, 4)})
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        for kernel, args, options in calls:
            result = compiled(kernel, args, options, target)
            assert any(name in result.asm for name in ("cubin", "hsaco")), list(result.asm)
            sys.stdout.write(f"{kernel.__name__}\n")


if __name__ == "__main__":
    main()
