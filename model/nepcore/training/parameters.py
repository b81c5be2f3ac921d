"""The parameters that are trained, as one vector: start values, the way to tables, and the way to a model file."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nepcore.errors import NepError
from nepcore.files.nep_layout import SWITCHES, Header
from nepcore.files.nep_txt import NepFile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from .settings import Settings

_BIASES = ("b0", "b1")


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the parts of the vector, in its order."""

    parts: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, model: NepFile) -> Layout:
        """Of a model: everything that is fitted but the energy offsets."""
        names = ["c_radial", "c_angular", "w0", "b0", "w1", *(["b1", "w2"] if len(model.hidden) == 2 else [])]
        return cls(tuple((name, tuple(getattr(model, name).shape)) for name in names))

    @property
    def size(self) -> int:
        """Length of the vector."""
        return sum(math.prod(shape) for _, shape in self.parts)

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """The parts of a vector."""
        pieces = torch.split(vector, [math.prod(shape) for _, shape in self.parts])
        return {name: piece.view(shape) for (name, shape), piece in zip(self.parts, pieces, strict=True)}

    def vector(self, model: NepFile, dtype: torch.dtype) -> Tensor:
        """The vector of a model."""
        parts = [torch.from_numpy(np.ascontiguousarray(getattr(model, name))).reshape(-1) for name, _ in self.parts]
        return torch.cat(parts).to(dtype)

    def decayed(self, dtype: torch.dtype) -> Tensor:
        """1 where weights decay, 0 for biases."""
        return torch.cat([torch.full((math.prod(s),), float(n not in _BIASES), dtype=dtype) for n, s in self.parts])

    def model(self, vector: Tensor, like: NepFile, bias: float, q_scaler: NDArray[np.float64]) -> NepFile:
        """The model of a vector; its numbers are those that eight digits carry."""
        host = vector.detach().to("cpu", torch.float64)
        arrays: dict[str, Any] = {name: _rounded(part.numpy()) for name, part in self.views(host).items()}
        return replace(like, **arrays, bias=float(_rounded(np.array([bias]))[0]), q_scaler=_rounded(q_scaler))


def start_model(settings: Settings, most: tuple[int, int]) -> NepFile:
    """A model with start values, scalers of 1 and no offset.

    Args:
        settings: Sizes and seed.
        most: Most neighbours of an atom within the radial and the angular cutoff.
    """
    layout = settings.layout
    T, D = len(layout.elements), layout.dim
    bits = np.random.PCG64([settings.seed, 0])

    def even(shape: tuple[int, ...]) -> NDArray[np.float64]:
        raw = np.asarray(bits.random_raw(math.prod(shape)), np.uint64).reshape(shape)
        return ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-52 - 1.0

    def normal(shape: tuple[int, ...], scale: float) -> NDArray[np.float64]:
        # Box and Muller, from two even numbers each.
        a, b = 0.5 * (even(shape) + 1.0), even(shape)
        return scale * np.sqrt(-2.0 * np.log(a)) * np.cos(np.pi * b)

    gpumd = settings.q_scaler == "gpumd"
    arrays: dict[str, NDArray[np.float64]] = {}
    for name, shape in (*layout.network_blocks(), *layout.common_blocks()):
        whole = (T, *shape) if name in {"w0", "b0", "w1", "b1", "w2"} else shape
        if name in {"c_radial", "c_angular"}:
            arrays[name] = even(whole) if gpumd else normal(whole, 0.1)
        elif name in {"w0", "w1", "w2"}:
            fan = D if name == "w0" else whole[-1]
            arrays[name] = even(whole) if gpumd else normal(whole, 1.0 / math.sqrt(fan))
        elif name in _BIASES:
            arrays[name] = even(whole) if gpumd else np.zeros(whole)
    pairs = None if settings.zbl_pairs is None else np.array(settings.zbl_pairs)
    values = {f.name: getattr(layout, f.name) for f in fields(Header)}
    values |= {
        "cutoff_radial": np.array(layout.cutoff_radial), "cutoff_angular": np.array(layout.cutoff_angular),
        "switches": dict(zip(SWITCHES, layout.switches, strict=True)), "mn_radial": float(most[0]),
        "mn_angular": float(most[1]), "zbl_pairs": pairs, "b1": None, "w2": None, "bias": 0.0,
        "type_bias": np.zeros(T) if layout.version == 5 else None, "q_scaler": np.ones(D),
    }  # fmt: skip
    return NepFile(**(values | arrays))


def without_types(model: NepFile, elements: Sequence[str]) -> NepFile:
    """A model cut down to some of its elements, in the model's own order.

    Raises:
        NepError: An element that the model does not have.
    """
    missing = [symbol for symbol in elements if symbol not in model.elements]
    if missing:
        raise NepError(f"the model to start from has no {', '.join(missing)}; it has {' '.join(model.elements)}")
    kept = [t for t, symbol in enumerate(model.elements) if symbol in set(elements)]
    if len(kept) == len(model.elements):
        return model
    T = len(model.elements)
    pairs = model.zbl_pairs
    if pairs is not None:
        number = np.zeros((T, T), np.int64)
        number[np.triu_indices(T)] = np.arange(len(pairs))
        pairs = pairs[[number[a, b] for i, a in enumerate(kept) for b in kept[i:]]]
    networks: dict[str, Any] = {
        name: None if getattr(model, name) is None else getattr(model, name)[kept if model.version != 3 else [0]]
        for name in ("w0", "b0", "w1", "b1", "w2")
    }
    both = np.ix_(range(model.c_radial.shape[0]), range(model.c_radial.shape[1]), kept, kept)
    both_a = np.ix_(range(model.c_angular.shape[0]), range(model.c_angular.shape[1]), kept, kept)
    return replace(
        model,
        elements=tuple(model.elements[t] for t in kept),
        cutoff_radial=model.cutoff_radial[kept],
        cutoff_angular=model.cutoff_angular[kept],
        type_bias=None if model.type_bias is None else model.type_bias[kept],
        c_radial=model.c_radial[both],
        c_angular=model.c_angular[both_a],
        zbl_pairs=pairs,
        header=(),
        **networks,
    )


def scalers(least: NDArray[np.float64], most: NDArray[np.float64], temperature: bool) -> NDArray[np.float64]:
    """1 / (max − min) of each descriptor component; 1 where it is constant, 0.001 for the temperature."""
    span = most - least
    usable = np.isfinite(span) & (span > 1e-10 * np.maximum(1.0, np.abs(most)))
    out = np.where(usable, 1.0 / np.where(usable, span, 1.0), 1.0)
    if temperature:
        out[-1] = 0.001
    return out


def _rounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    flat = [float(f"{v:.7e}") for v in values.reshape(-1).tolist()]
    return np.array(flat, np.float64).reshape(values.shape)
