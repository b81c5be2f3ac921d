"""Structures as other programs write them: pymatgen's ``as_dict``, OPTIMADE structure resources, QCSchema molecules.

Each is recognised by keys that only it has. What these formats can say and a NEP cannot use (partial occupancy, ghost
atoms, assemblies) is refused with a word on what to do; charges, oxidation states, spins and masses do not change the
energy of a NEP and are not looked at. ``temperature`` (K) may stand beside their own keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from nepcore.elements import NUMBERS
from nepcore.errors import StructureError

from . import lists
from .json_item import Item, missing
from .request import describe

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

BOHR = 0.5291772105638411
"""Å; the value of ASE 3 (CODATA 2014), so that a bridge by way of ASE gives the same structure."""

MAX_MISMATCH = 1e-3
"""Largest distance between the two positions that pymatgen writes for a site, Å."""


def reader(value: dict[str, Any]) -> Callable[[dict[str, Any]], Item] | None:
    """What reads an object that has other keys than ours; None if nobody does."""
    if "@class" in value:
        return _pymatgen
    if "cartesian_site_positions" in value or isinstance(value.get("attributes"), dict):
        return _optimade
    if "geometry" in value or str(value.get("schema_name", "")).startswith("qc"):
        return _qcschema
    return None


def _pymatgen(value: dict[str, Any]) -> Item:
    kind = value["@class"]
    if kind not in ("Structure", "IStructure", "Molecule", "IMolecule"):
        raise StructureError(
            "bad_value", f"@class is {describe(kind)}; of pymatgen's objects Structure and Molecule are taken",
            field="@class",
        )  # fmt: skip
    sites = _list(value, "sites")
    numbers = np.array([_pymatgen_element(site, i) for i, site in enumerate(sites)], np.uint8)
    periodic = kind.endswith("Structure")
    matrix: NDArray[np.float64] | None = None
    pbc: list[bool] | None = [False] * 3
    if periodic:
        lattice = value.get("lattice")
        if not isinstance(lattice, dict):
            raise missing(value, "lattice", "an object with the key matrix")
        if lattice.get("matrix") is None:
            raise missing(lattice, "matrix", "three lattice vectors as rows, Å")
        matrix = lists.cell(lattice["matrix"])
        flags = lattice.get("pbc")
        pbc = None if flags is None else lists.pbc(flags)
    positions = _pymatgen_positions(sites, matrix)
    inner = value.get("properties")
    heat = value.get("temperature")
    if heat is None and isinstance(inner, dict):
        heat = inner.get("temperature")
    return Item(numbers, positions, matrix, pbc, _temperature(heat))


def _pymatgen_element(site: Any, i: int) -> int:
    if not isinstance(site, dict):
        raise StructureError(
            "bad_value", f"sites: site {i + 1} must be an object, not {describe(site)}", field="sites", atoms=(i,)
        )
    species = site.get("species")
    if not isinstance(species, list) or not all(isinstance(entry, dict) for entry in species):
        raise StructureError(
            "bad_value", f"sites: species of site {i + 1} must be a list of objects", field="sites", atoms=(i,)
        )
    if len(species) != 1 or not _is_one(species[0].get("occu", 1)):
        raise _partial(i, "sites")
    return _element(species[0].get("element"), i, "sites")


def _pymatgen_positions(sites: list[Any], matrix: NDArray[np.float64] | None) -> NDArray[np.float64]:
    cartesian = [site.get("xyz") for site in sites]
    fractional = [site.get("abc") for site in sites]
    have_xyz = None not in cartesian
    have_abc = matrix is not None and None not in fractional
    if not have_xyz and not have_abc:
        wanted = "xyz" if matrix is None else "xyz or abc"
        raise StructureError("missing_field", f"sites: not all sites have {wanted}", field="sites")
    if not have_abc:
        return lists.positions(cartesian)
    assert matrix is not None
    with np.errstate(all="ignore"):
        mapped = lists.positions(fractional) @ matrix
        if not have_xyz:
            return mapped
        given = lists.positions(cartesian)
        apart = np.abs(given - mapped).max(axis=1, initial=0.0)
    if (apart > MAX_MISMATCH).any():
        i = int(np.argmax(apart > MAX_MISMATCH))
        raise StructureError(
            "ambiguous", f"sites: xyz and abc of site {i + 1} are {apart[i]:.3g} Å apart; leave out the one that is "
            "wrong", field="sites", atoms=(i,),
        )  # fmt: skip
    return given


def _optimade(value: dict[str, Any]) -> Item:
    resource = value.get("attributes")
    found = resource if isinstance(resource, dict) else value
    if value.get("type", "structures") != "structures":
        raise StructureError(
            "bad_value", f"type is {describe(value['type'])}; of OPTIMADE's resources structures are taken",
            field="type",
        )  # fmt: skip
    if found.get("cartesian_site_positions") is None:
        raise missing(found, "cartesian_site_positions", "one row [x, y, z] in Å for each site")
    positions = lists.positions(found["cartesian_site_positions"])
    symbols = _optimade_species(found)
    names = _list(found, "species_at_sites")
    numbers = np.array([_optimade_element(name, i, symbols) for i, name in enumerate(names)], np.uint8)
    pbc = _optimade_periodicity(found)
    vectors = found.get("lattice_vectors")
    cell = None
    if vectors is not None:
        # Directions without a period may have a vector of nulls.
        rows = [[0.0] * 3 if row == [None] * 3 else row for row in _list(found, "lattice_vectors")]
        cell = lists.cell(rows)
        empty = [row == [None] * 3 for row in vectors]
        if pbc is not None and any(periodic and null for periodic, null in zip(pbc, empty, strict=True)):
            raise StructureError(
                "singular_cell", "lattice_vectors: a periodic direction has no vector", field="lattice_vectors"
            )
        if pbc is None and any(empty):
            pbc = [not null for null in empty]
    return Item(numbers, positions, cell, pbc, _temperature(value.get("temperature", found.get("temperature"))))


def _optimade_species(found: dict[str, Any]) -> dict[str, str | None] | None:
    """Symbol by species name, None for species that are no single element; None if the resource has no species."""
    if found.get("species") is None:
        return None
    symbols: dict[str, str | None] = {}
    for entry in _list(found, "species"):
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            raise StructureError("bad_value", "species must be a list of objects with a name", field="species")
        kinds, shares = entry.get("chemical_symbols"), entry.get("concentration")
        whole = shares is None or (isinstance(shares, list) and len(shares) == 1 and _is_one(shares[0]))
        ordered = isinstance(kinds, list) and len(kinds) == 1 and isinstance(kinds[0], str) and whole
        attached = bool(entry.get("attached"))
        symbols[name] = kinds[0] if ordered and not attached else None
    return symbols


def _optimade_element(name: Any, i: int, symbols: dict[str, str | None] | None) -> int:
    if symbols is None:
        return _element(name, i, "species_at_sites")
    if not isinstance(name, str) or name not in symbols:
        raise StructureError(
            "bad_value", f"species_at_sites: atom {i + 1} is {describe(name)}, which is not in species",
            field="species_at_sites", atoms=(i,),
        )  # fmt: skip
    symbol = symbols[name]
    if symbol is None:
        raise _partial(i, "species_at_sites")
    return _element(symbol, i, "species_at_sites")


def _optimade_periodicity(found: dict[str, Any]) -> list[bool] | None:
    flags = found.get("dimension_types")
    if flags is not None:
        try:
            return lists.pbc(flags)
        except StructureError as error:
            raise StructureError(
                error.code, error.reason.replace("pbc", "dimension_types", 1), field="dimension_types"
            ) from None
    count = found.get("nperiodic_dimensions")
    if count is None:
        return None
    if count == 0 or count == 3:  # noqa: PLR1714 - a list is not hashable
        return [bool(count)] * 3
    raise StructureError(
        "ambiguous", f"nperiodic_dimensions is {describe(count)} and dimension_types is missing; wanted "
        "dimension_types, which says which directions are periodic", field="dimension_types",
    )  # fmt: skip


def _qcschema(value: dict[str, Any]) -> Item:
    molecule = value.get("molecule") if "geometry" not in value else value
    if not isinstance(molecule, dict):
        raise missing(value, "geometry", "3 n numbers in bohr")
    numbers = lists.symbols(_list(molecule, "symbols"))
    real = molecule.get("real")
    if isinstance(real, list) and not all(real):
        i = next(i for i, flag in enumerate(real) if not flag)
        raise StructureError(
            "ambiguous", f"real: atom {i + 1} is a ghost atom, which a NEP cannot describe; leave it out",
            field="real", atoms=(i,),
        )  # fmt: skip
    flat = _list(molecule, "geometry")
    rows = flat
    if not any(isinstance(row, list) for row in flat):
        if len(flat) % 3:
            raise StructureError(
                "bad_shape", f"geometry has {len(flat)} numbers; wanted 3 for each of {len(numbers)} atoms",
                field="geometry",
            )  # fmt: skip
        rows = [flat[i : i + 3] for i in range(0, len(flat), 3)]
    positions = lists.positions(rows) * BOHR
    heat = value.get("temperature", molecule.get("temperature"))
    return Item(numbers, positions, None, [False] * 3, _temperature(heat))


def _temperature(value: Any) -> float:
    return np.nan if value is None else lists.temperature(value)


def _list(value: dict[str, Any], name: str) -> list[Any]:
    found = value.get(name)
    if found is None:
        raise missing(value, name, "a list")
    if not isinstance(found, list):
        raise StructureError("bad_value", f"{name} must be a list, not {describe(found)}", field=name)
    return found


def _is_one(share: Any) -> bool:
    return isinstance(share, (int, float)) and not isinstance(share, bool) and abs(share - 1) < 1e-8


def _element(symbol: Any, i: int, name: str) -> int:
    number = NUMBERS.get(symbol) if isinstance(symbol, str) else None
    if number is None:
        raise StructureError(
            "bad_value", f"{name}: atom {i + 1} is {describe(symbol)}, which is not a chemical symbol, H to Pu",
            field=name, atoms=(i,),
        )  # fmt: skip
    return number


def _partial(i: int, name: str) -> StructureError:
    return StructureError(
        "ambiguous", f"{name}: site {i + 1} is not one whole atom (partial occupancy, a vacancy or a group); choose "
        "an ordered structure, with one element on each site", field=name, atoms=(i,),
    )  # fmt: skip
