"""What goes into bodies: structures gathered, cut into pieces, and their results joined again. For both clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Union

import numpy as np

from nepcore.errors import StructureError
from nepcore.structures import PROPERTIES, Predictions, Structure, Structures, atomic_numbers
from nepserve.wire.msgpack_format import pack_request

from .errors import ServerError, StructureRejected

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ase import Atoms
    from numpy.typing import NDArray

StructureLike = Union["Structure", "Atoms", "Mapping[str, Any]"]
"""One structure: of nepcore, of ASE, or a mapping with the keys of :data:`KEYS`."""

OnError = Literal["raise", "return"]

KEYS = ("numbers", "symbols", "positions", "cell", "pbc", "temperature")
"""Keys of a structure given as a mapping: ``numbers`` or ``symbols``, ``positions`` (Å), and optionally the rest."""


@dataclass(frozen=True)
class Work:
    """Structures of a call, packed, apart from those that cannot be sent.

    Attributes:
        structures: Those to be sent, in order.
        places: Their indices in the call; None if all are sent.
        counts: Atoms of all structures of the call, (B,); 0 where a faulty one does not say.
        rejected: Those that cannot be sent, by index in the call.
    """

    structures: Structures
    places: NDArray[np.int64] | None
    counts: NDArray[np.int64]
    rejected: dict[int, StructureError]

    def index(self, sent: int) -> int:
        """Index in the call of the structure that is number ``sent`` of those to be sent."""
        return sent if self.places is None else int(self.places[sent])

    def span(self, start: int, stop: int) -> range:
        """Indices in the call from the first to the last of a piece of those to be sent."""
        return range(self.index(start), self.index(stop - 1) + 1)


def as_structure(item: StructureLike) -> Structure:
    """One structure in the form of nepcore.

    Raises:
        StructureError: It is not a structure: an unknown key, symbol or a wrong shape.
    """
    if isinstance(item, Structure):
        # Made by hand, it may hold numbers that do not fit into the byte they travel in.
        return item if item.numbers.dtype == np.uint8 else replace(item, numbers=atomic_numbers(item.numbers))
    if isinstance(item, Mapping):
        return _from_mapping(item)
    if hasattr(item, "positions") and hasattr(item, "numbers") and hasattr(item, "pbc"):
        return Structure.from_ase(item)
    raise StructureError(
        "bad_value",
        f"a structure is an ASE Atoms, a nepcore.Structure or a mapping with the keys {', '.join(KEYS)}, "
        f"not a {type(item).__name__}",
    )


def _from_mapping(item: Mapping[str, Any]) -> Structure:
    for key in item:
        if key not in KEYS:
            raise StructureError("unknown_field", f"a structure has no key {key!r}; its keys are: {', '.join(KEYS)}")
    given = [key for key in ("numbers", "symbols") if item.get(key) is not None]
    if len(given) != 1:
        found = "both" if given else "neither"
        raise StructureError(
            "ambiguous" if given else "missing_field", f"a structure needs numbers or symbols; {found} came"
        )
    if item.get("positions") is None:
        raise StructureError("missing_field", "positions are missing", field="positions")
    temperature = item.get("temperature")
    try:
        return Structure.make(
            item[given[0]], item["positions"], item.get("cell"), item.get("pbc"),
            None if temperature is None else float(temperature),
        )  # fmt: skip
    except StructureError:
        raise
    except (TypeError, ValueError) as error:
        raise StructureError("bad_value", f"not a structure: {error}") from error


def gather_one(item: StructureLike | Structures) -> Structures:
    """One structure as a block of one.

    Raises:
        StructureRejected: It is not a structure, or not one.
    """
    try:
        if isinstance(item, Structures):
            if len(item) != 1:
                reason = f"evaluate takes one structure and {len(item)} came; evaluate_many takes any number"
                raise StructureError("bad_value", reason)
            return _in_bytes(item)
        one = as_structure(item)
        heat = np.nan if one.temperature is None else one.temperature
        # Views in place of the copies that packing makes: they are written to the body at once.
        return Structures(
            np.array([len(one)], np.int64), one.numbers, one.positions, one.cell[None], one.pbc[None], np.array([heat])
        )
    except StructureError as error:
        raise StructureRejected.of(error) from error


def _in_bytes(block: Structures) -> Structures:
    return block if block.numbers.dtype == np.uint8 else replace(block, numbers=atomic_numbers(block.numbers))


def gather(items: Structures | Iterable[StructureLike]) -> Work:
    """Pack the structures of a call; those that are none are set apart."""
    if isinstance(items, Structures):
        return Work(_in_bytes(items), None, items.counts, {})
    if isinstance(items, (Structure, Mapping)) or hasattr(items, "get_positions"):
        raise TypeError("evaluate_many takes a sequence of structures; evaluate takes one")
    good: list[Structure] = []
    places: list[int] = []
    counts: list[int] = []
    rejected: dict[int, StructureError] = {}
    for index, item in enumerate(items):
        try:
            structure = as_structure(item)
        except StructureError as error:
            rejected[index] = error
            counts.append(len(item) if hasattr(item, "get_positions") else 0)
            continue
        good.append(structure)
        places.append(index)
        counts.append(len(structure))
    return Work(
        Structures.pack(good),
        np.array(places, np.int64) if rejected else None,
        np.array(counts, np.int64),
        rejected,
    )


def check_properties(properties: Iterable[str]) -> tuple[str, ...]:
    """The names of properties, each once.

    Raises:
        ValueError: None, or one that does not exist.
    """
    if isinstance(properties, str):
        raise ValueError(f"properties must be a list of names, not the string {properties!r}")
    names = tuple(dict.fromkeys(properties))
    unknown = [name for name in names if name not in PROPERTIES]
    if unknown or not names:
        what = f"there is no property {unknown[0]!r}" if unknown else "no property was asked for"
        raise ValueError(f"{what}; there are: {', '.join(PROPERTIES)}")
    return names


def check_on_error(on_error: OnError) -> OnError:
    """What happens with structures that cannot be evaluated."""
    if on_error not in {"raise", "return"}:
        raise ValueError(f"on_error must be 'raise' or 'return', not {on_error!r}")
    return on_error


def request_body(
    structures: Structures, properties: Sequence[str], model: str | None, dtype: str, *, single: bool = False
) -> bytes:
    """The body that asks for ``properties`` of ``structures``."""
    return pack_request(structures, properties, model, "f4" if dtype == "float32" else "f8", single=single)


def join(work: Work, blocks: Sequence[Predictions], properties: Sequence[str], dtype: str) -> Predictions:
    """The results of a call in the caller's order, from those of its bodies in theirs.

    Arrays are fresh and writable. Rows of structures that failed are NaN.
    """
    if not blocks:
        return Predictions.failed(work.counts, properties, work.rejected, dtype=dtype)
    width = max((b.values["descriptors"].shape[1] for b in blocks if "descriptors" in b.values), default=0)
    found = Predictions.concatenate([_complete(block, properties, width) for block in blocks])
    known = found.stress_known.copy()
    known[list(found.errors)] = False
    found = Predictions(found.counts, found.values, known, found.errors)
    if work.places is not None:
        return found.among(work.counts, work.places, work.rejected)
    return Predictions(found.counts, {k: _own(v) for k, v in found.values.items()}, known, found.errors)


def failed_block(
    structures: Structures, properties: Sequence[str], dtype: str, error: StructureRejected
) -> Predictions:
    """The result of one structure that the server refused."""
    fault = StructureError(error.code, error.reason, field=error.field, atoms=error.atoms)
    return Predictions.failed(structures.counts, properties, {0: fault}, dtype=dtype)


def _complete(block: Predictions, properties: Sequence[str], width: int) -> Predictions:
    """A block with all properties, in the shapes of its neighbours, so that the blocks can be joined."""
    values = {name: block.values[name] for name in properties if name in block.values}
    if "stress" in properties and "stress" not in values:
        # A body of molecules alone may come without.
        values["stress"] = np.full((len(block), 6), np.nan)
    vectors = values.get("descriptors")
    if vectors is not None and vectors.shape[1] < width:
        # Every structure of the body failed, and nobody said how long a descriptor is.
        values["descriptors"] = np.full((len(vectors), width), np.nan, vectors.dtype)
    return Predictions(block.counts, values, block.stress_known, block.errors)


def _own(array: NDArray[Any]) -> NDArray[Any]:
    return array if array.flags.writeable and array.base is None else array.copy()


@dataclass
class Pace:
    """How many atoms the next body carries: small ones first, larger ones while they are answered quickly.

    A body must come back well within the time-out of a slow server, and be worth the journey to a fast one; which of
    the two it is, the first answers tell.

    Attributes:
        largest: Atoms in one body at most (a larger structure makes a body of its own).
        timeout: Time-out of one body, s.
        atoms: Atoms in the next body.
    """

    largest: int
    timeout: float
    atoms: int = field(init=False)

    def __post_init__(self) -> None:
        if self.largest < 1:
            raise ValueError(f"chunk_atoms must be at least 1, not {self.largest}")
        self.atoms = min(self.largest, FIRST_ATOMS)

    def note(self, atoms: int, seconds: float) -> None:
        """Learn from a body of ``atoms`` that was answered after ``seconds``, others in flight included."""
        quick = min(0.5, self.timeout / 40)
        if seconds < quick and atoms >= self.atoms // 2:
            self.atoms = min(self.atoms * 2, self.largest)
        elif seconds > 4 * quick:
            self.atoms = max(min(self.atoms, atoms) // 2, 1)

    def stop(self, offsets: NDArray[np.int64], start: int) -> int:
        """Where the body ends that begins with structure ``start``."""
        fits = int(np.searchsorted(offsets, offsets[start] + self.atoms, side="right")) - 1
        return min(max(fits, start + 1), start + MAX_STRUCTURES, len(offsets) - 1)


FIRST_ATOMS = 4096
"""Atoms in the first body of a large call."""

MAX_STRUCTURES = 20_000
"""Structures in one body at most."""


def many_priority(priority: str | None, pace: Pace, work: Work) -> str | None:
    """Priority of a call with many structures: one that takes several bodies lets others pass."""
    offsets = work.structures.offsets
    if priority is None and len(offsets) > 1 and pace.stop(offsets, 0) < len(offsets) - 1:
        return "bulk"
    return priority


def cuts(error: Exception, size: int) -> bool:
    """Whether a body of ``size`` structures that failed with ``error`` should be sent again in halves."""
    if size < 2:
        return False
    return isinstance(error, StructureRejected) or (isinstance(error, ServerError) and error.status == 413)
