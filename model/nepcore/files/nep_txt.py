"""Reader and writer of ``nep.txt``, the model file of GPUMD.

:func:`read` takes potentials of versions 3, 4 and 5 (tags ``nep3``, ``nep4``, ``nep5``, each also with ``_zbl``, the
first two also with ``_temperature``) and refuses everything else by name. A file as GPUMD writes it comes back from
:func:`dumps` byte for byte; any other with the same values. Needs no torch.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nepcore.admission import Admission
from nepcore.errors import ModelFileError

from .nep_header import format_header, parse_float, parse_header, quoted
from .nep_layout import SWITCHES, Header, explain_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MAX_BYTES = 1 << 28
"""Largest file read: several times the largest model that GPUMD's trainer can make."""

_MAX_HEADER_LINES = 7
_MAX_SEARCHED = 1_000_000


@dataclass(frozen=True, eq=False)
class NepFile:
    """What a model file says. All arrays are float64.

    T types, M networks (1 for version 3, else T), D descriptor components, H and H2 neurons.

    Attributes:
        tag: First word of the file, such as ``nep4_zbl``.
        version: 3 (one network for all types), 4 (one a type), 5 (that with an output bias for each type).
        elements: Symbols in the order of the type index.
        temperature: Whether the last input of the network is the temperature (K).
        zbl: ``none``, ``universal``, ``typewise`` or ``flexible``.
        zbl_inner: Å; what the file says (typewise ZBL has it, and ignores it); None for none and flexible.
        zbl_outer: Å; None for none and flexible.
        zbl_factor: Factor of the sum of radii, typewise only.
        zbl_pairs: Inner and outer cutoff (Å) and a1 … a8 for pairs (0,0), (0,1), …, (1,1), …; (T(T+1)/2, 10),
            flexible only.
        cutoff_radial: Å, (T,). That of a pair is the mean of the two.
        cutoff_angular: Å, (T,).
        mn_radial: Largest number of neighbours seen in training (a hint, no limit); None if the file has none.
        mn_angular: Likewise within the angular cutoff.
        n_max_radial: Number of radial functions less one.
        n_max_angular: Number of angular functions less one.
        basis_radial: Largest index of the Chebyshev basis, radial.
        basis_angular: Likewise, angular.
        l_max: Largest l of the three-body terms.
        switches: Which of q222, q1111, q112, q123, q233, q134 are on.
        hidden: Neurons of the one or two hidden layers.
        w0: Input weights, (M, H, D).
        b0: Hidden biases, subtracted, (M, H).
        w1: Output weights (M, H); with two layers the weights of the second, (M, H2, H).
        b1: Biases of the second layer, subtracted, (M, H2); None with one layer.
        w2: Output weights behind the second layer, (M, H2); None with one layer.
        type_bias: Output bias of each type, subtracted, eV, (T,); version 5 only.
        bias: Common output bias, subtracted, eV.
        c_radial: Coefficients [n, k, type of the centre, type of the neighbour],
            (n_max_radial + 1, basis_radial + 1, T, T).
        c_angular: Likewise, (n_max_angular + 1, basis_angular + 1, T, T).
        q_scaler: Factors of the descriptor components (and of the temperature), (D,).
        header: Header lines of the file this came from; written back as long as they say what the fields say.
    """

    tag: str
    version: int
    elements: tuple[str, ...]
    temperature: bool
    zbl: str
    zbl_inner: float | None
    zbl_outer: float | None
    zbl_factor: float | None
    zbl_pairs: NDArray[np.float64] | None
    cutoff_radial: NDArray[np.float64]
    cutoff_angular: NDArray[np.float64]
    mn_radial: float | None
    mn_angular: float | None
    n_max_radial: int
    n_max_angular: int
    basis_radial: int
    basis_angular: int
    l_max: int
    switches: dict[str, bool]
    hidden: tuple[int, ...]
    w0: NDArray[np.float64]
    b0: NDArray[np.float64]
    w1: NDArray[np.float64]
    b1: NDArray[np.float64] | None
    w2: NDArray[np.float64] | None
    type_bias: NDArray[np.float64] | None
    bias: float
    c_radial: NDArray[np.float64]
    c_angular: NDArray[np.float64]
    q_scaler: NDArray[np.float64]
    header: tuple[str, ...] = ()

    @cached_property
    def layout(self) -> Header:
        """The sizes: everything but the numbers."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(Header)}
        values["elements"] = tuple(self.elements)
        values["cutoff_radial"] = tuple(map(float, self.cutoff_radial))
        values["cutoff_angular"] = tuple(map(float, self.cutoff_angular))
        values["switches"] = tuple(bool(self.switches.get(name, False)) for name in SWITCHES)
        values["hidden"] = tuple(map(int, self.hidden))
        return Header(**values)

    @property
    def dim(self) -> int:
        """D: length of the network's input, with the temperature where there is one."""
        return self.layout.dim

    @property
    def dim_radial(self) -> int:
        """Radial components of the descriptor; they come first."""
        return self.layout.dim_radial

    @property
    def dim_angular(self) -> int:
        """Angular components of the descriptor."""
        return self.layout.dim_angular

    @property
    def n_blocks(self) -> int:
        """nL: angular blocks, l = 1 … L and the switches that are on."""
        return self.layout.n_blocks

    @property
    def cutoff(self) -> float:
        """Largest radial cutoff, Å."""
        return float(np.max(self.cutoff_radial))

    @cached_property
    def admission(self) -> Admission:
        """Which structures this model can evaluate."""
        return Admission(tuple(self.elements), self.temperature, self.cutoff)

    def describe(self) -> dict[str, Any]:
        """The model in plain values, for JSON; cutoffs (Å) are lists by type. What is not known is left out."""
        description: dict[str, Any] = {
            "tag": self.tag,
            "version": self.version,
            "elements": list(self.elements),
            "cutoff_radial": list(self.layout.cutoff_radial),
            "cutoff_angular": list(self.layout.cutoff_angular),
            "n_max": [self.n_max_radial, self.n_max_angular],
            "basis_size": [self.basis_radial, self.basis_angular],
            "l_max": self.l_max,
            "switches": dict(zip(SWITCHES, self.layout.switches, strict=True)),
            "hidden": list(self.layout.hidden),
            "descriptor_size": self.dim,
            "zbl": self.zbl,
            "temperature": self.temperature,
            "parameters": self.layout.n_parameters,
        }
        if self.mn_radial is not None and self.mn_angular is not None:
            description["max_neighbors"] = [self.mn_radial, self.mn_angular]
        return description

    def equals(self, other: NepFile) -> bool:
        """Whether both say the same, number by number, however they are spelled."""
        return self.layout == other.layout and np.array_equal(_flatten(self), _flatten(other))


def read(path: str | os.PathLike[str]) -> NepFile:
    """Read a model file.

    Raises:
        ModelFileError: the file cannot be read, is not a model, or is one that is not supported; it names the line.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise ModelFileError(path, None, "is a directory, not a model file")
        with path.open("rb") as file:
            content = bytearray()
            while len(content) <= MAX_BYTES and (chunk := file.read(1 << 20)):
                content += chunk
                if len(content) == len(chunk):
                    _check_text(content, path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelFileError(path, None, f"cannot be read: {reason}") from error
    if len(content) > MAX_BYTES:
        raise ModelFileError(path, None, f"larger than {MAX_BYTES >> 20} MiB, which no NEP model is")
    _check_text(content, path)
    return loads(content.decode("utf-8", errors="replace"), path)


def loads(text: str, path: str | os.PathLike[str] = "nep.txt") -> NepFile:
    """Read a model from the text of its file; ``path`` is for messages.

    Raises:
        ModelFileError: as for :func:`read`.
    """
    path = Path(path)
    text = text.removeprefix("\ufeff")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = text.rstrip()
    if not text:
        raise ModelFileError(path, None, "the file is empty")
    header_lines = text.split("\n", _MAX_HEADER_LINES)[:_MAX_HEADER_LINES]
    header = parse_header(header_lines, path)
    values = _parse_values(text, header, path)
    arrays = _split(values, header)
    settings = {f.name: getattr(header, f.name) for f in fields(Header)}
    settings["cutoff_radial"] = np.array(header.cutoff_radial)
    settings["cutoff_angular"] = np.array(header.cutoff_angular)
    settings["switches"] = dict(zip(SWITCHES, header.switches, strict=True))
    return NepFile(**settings, **arrays, header=tuple(header_lines[: header.n_lines]))


def dumps(model: NepFile) -> str:
    """The text of a model file, as GPUMD writes it where eight digits carry the values, else with as many as it takes.

    Raises:
        ValueError: arrays whose shapes are not those of the sizes, or numbers that are not finite.
    """
    header, layout = list(model.header), model.layout
    if not _says(header, layout):
        header = format_header(layout)
        try:
            said = parse_header(header, "header")
        except ModelFileError as error:
            raise ValueError(f"no model file can say this: {error.reason}") from error
        if said != layout:
            raise ValueError(f"the fields contradict each other; the header would be {header}")
    values = _flatten(model).tolist()
    numbers = [f"{v:15.7e}" for v in values]
    for i, (number, value) in enumerate(zip(numbers, values, strict=True)):
        if float(number) != value:
            numbers[i] = f"{value!r:>15}"
    return "\n".join([*header, *numbers, ""])


def write(model: NepFile, path: str | os.PathLike[str]) -> None:
    """Write a model file. Whoever reads meanwhile sees the old file or the new one, never half of it.

    Raises:
        ValueError: as for :func:`dumps`; nothing is written then.
        OSError: the file cannot be written.
    """
    content = dumps(model).encode()
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        target.write_bytes(content)  # a pipe or a terminal: nothing to replace
        return
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        draft.write_bytes(content)
        draft.replace(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _says(header: Sequence[str], layout: Header) -> bool:
    """Whether header lines say what the fields say."""
    try:
        return len(header) == layout.n_lines and parse_header(header, "header") == layout
    except ModelFileError:
        return False


def _check_text(content: bytes | bytearray, path: Path) -> None:
    """Refuse what is plainly no text before it is taken for a model."""
    for magic, what in (
        (b"\x1f\x8b", "gzip-compressed; unpack it first"),
        (b"PK\x03\x04", "a zip archive (perhaps a PyTorch or NumPy file), not a nep.txt"),
        (b"\xff\xfe", "UTF-16 text; save it as UTF-8"),
        (b"\xfe\xff", "UTF-16 text; save it as UTF-8"),
    ):
        if content.startswith(magic):
            raise ModelFileError(path, None, f"the file is {what}")
    zero = content.find(b"\0")
    if zero >= 0:
        line = content.count(b"\n", 0, zero) + 1
        raise ModelFileError(path, line, f"a zero byte (at offset {zero}): this is not a text file")


def _parse_values(text: str, header: Header, path: Path) -> NDArray[np.float64]:
    """The numbers behind the header, counted and checked."""
    first, expected = header.n_lines, header.n_values
    found = text.count("\n") + 1 - first
    if found == expected:
        body = text.split("\n")[first:]
        try:
            values = np.fromiter(map(float, body), np.float64, expected)
        except ValueError:
            values = np.full(1, np.nan)
        # float() takes "1_000" and digits of other scripts, which no other reader of this format does.
        if np.isfinite(values).all() and all(map(str.isascii, body)) and not any("_" in line for line in body):
            return values
    else:
        # Enough to name a faulty line; the whole of a wrong file may be large.
        last = first + min(expected + 1, found, _MAX_SEARCHED)
        body = text.split("\n", last)[first:last]
    for i, line in enumerate(body):
        if not line.isascii() or parse_float(line.strip()) is None:
            raise ModelFileError(path, first + i + 1, _number_fault(line, i + 1, expected))
    reason = f"expected {expected:,} numbers after the header ({_sizes(header)}), found {max(found, 0):,}"
    raise ModelFileError(
        path, first + expected + 1 if found > expected else None, reason + explain_count(header, found)
    )


def _number_fault(text: str, which: int, total: int) -> str:
    if which > total:
        return f"expected the end after {total:,} numbers, found {quoted(text)}"
    if not text.strip():
        return f"blank line; expected number {which:,} of {total:,}"
    words = text.split()
    if len(words) > 1 and parse_float(words[0]) is not None:
        return f"expected one number, found {len(words)} words: {quoted(text)}"
    return f"expected a finite number ({which:,} of {total:,}), found {quoted(text)}"


def _sizes(header: Header) -> str:
    sizes = {name: math.prod(shape) for name, shape in header.common_blocks()}
    networks = header.n_networks * header.network_size + sizes["bias"]
    words = [
        f"networks {networks:,}",
        f"descriptor {sizes['c_radial'] + sizes['c_angular']:,}",
        f"scalers {sizes['q_scaler']:,}",
    ]
    if "zbl_pairs" in sizes:
        words.append(f"ZBL {sizes['zbl_pairs']:,}")
    return ", ".join(words)


def _split(values: NDArray[np.float64], header: Header) -> dict[str, Any]:
    """Arrays by name from the numbers in file order."""
    M, size = header.n_networks, header.network_size
    arrays: dict[str, Any] = dict.fromkeys(("b1", "w2", "type_bias", "zbl_pairs"))
    networks, start = values[: M * size].reshape(M, size), 0
    for name, shape in header.network_blocks():
        n = math.prod(shape)
        arrays[name] = networks[:, start : start + n].reshape(M, *shape).copy()
        start += n
    start = M * size
    for name, shape in header.common_blocks():
        n = math.prod(shape)
        arrays[name] = values[start : start + n].reshape(shape).copy()
        start += n
    arrays["bias"] = float(arrays["bias"])
    return arrays


def _flatten(model: NepFile) -> NDArray[np.float64]:
    """The numbers in file order, with every shape checked."""
    layout = model.layout
    M = layout.n_networks
    networks = [_block(model, name, (M, *shape)).reshape(M, -1) for name, shape in layout.network_blocks()]
    common = [_block(model, name, shape).reshape(-1) for name, shape in layout.common_blocks()]
    return np.concatenate([np.concatenate(networks, axis=1).reshape(-1), *common])


def _block(model: NepFile, name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    block = np.asarray(getattr(model, name), dtype=np.float64)
    if block.shape != shape:
        raise ValueError(f"{name} has shape {block.shape}; the model's sizes ask for {shape}")
    if not np.isfinite(block).all():
        raise ValueError(f"{name} has numbers that are not finite")
    return block
