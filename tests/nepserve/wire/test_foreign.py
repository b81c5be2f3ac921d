"""Structures in the keys of pymatgen, OPTIMADE and QCSchema, in the shape that these programs write today."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from nepserve import wire
from nepserve.wire.json_foreign import BOHR
from wire_samples import CELL, SILICON, WATER, same, silicon

if TYPE_CHECKING:
    from nepcore.errors import StructureError


def site(element: str, xyz: list[float], abc: list[float] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "species": [{"element": element, "oxidation_state": 4.0, "spin": None, "occu": 1}],
        "properties": {}, "label": f"{element}4+", "xyz": xyz,
    }  # fmt: skip
    return found if abc is None else {**found, "abc": abc}


PYMATGEN: dict[str, Any] = {
    "@module": "pymatgen.core.structure", "@class": "Structure", "charge": 0,
    "lattice": {"matrix": CELL, "pbc": [True] * 3, "a": 3.8466, "alpha": 60.0, "volume": 40.247},
    "properties": {},
    "sites": [site("Si", [0.0] * 3, [0.0] * 3), site("Si", [1.36] * 3, [0.25] * 3)],
}  # fmt: skip
MOLECULE: dict[str, Any] = {
    "@module": "pymatgen.core.structure", "@class": "Molecule", "charge": 0.0, "spin_multiplicity": 1,
    "sites": [site(s, x) for s, x in zip(WATER["symbols"], WATER["positions"], strict=True)], "properties": {},
}  # fmt: skip
ATTRIBUTES: dict[str, Any] = {
    "lattice_vectors": CELL, "cartesian_site_positions": SILICON["positions"], "species_at_sites": ["Si1", "Si1"],
    "species": [{"name": "Si1", "chemical_symbols": ["Si"], "concentration": [1.0], "mass": None}],
    "dimension_types": [1, 1, 1], "nperiodic_dimensions": 3, "nsites": 2, "structure_features": [],
}  # fmt: skip
OPTIMADE: dict[str, Any] = {"id": "x/1", "type": "structures", "attributes": ATTRIBUTES, "relationships": {}}
QCSCHEMA: dict[str, Any] = {
    "schema_name": "qcschema_molecule", "schema_version": 2, "validated": True, "symbols": WATER["symbols"],
    "geometry": (np.array(WATER["positions"]) / BOHR).ravel().tolist(), "name": "H2O", "molecular_charge": 0.0,
    "molecular_multiplicity": 1, "real": [True] * 3, "extras": {},
    "provenance": {"creator": "x", "routine": "a:b"},
}  # fmt: skip


def decode(structure: Any) -> wire.Request:
    return wire.decode("application/json", json.dumps({"structure": structure}).encode())


def fault(structure: Any) -> StructureError:
    request = decode(structure)
    assert list(request.errors) == [0]
    return request.errors[0]


def changed(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with one entry changed; a value of ``...`` takes the key away."""
    found = copy.deepcopy(base)
    inner: Any = found
    *way, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    for key in way:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return found


@pytest.mark.parametrize(
    "structure",
    [
        pytest.param(PYMATGEN, id="pymatgen"),
        pytest.param(changed(changed(PYMATGEN, "sites.0.xyz", ...), "sites.1.xyz", ...), id="pymatgen, fractional"),
        pytest.param(changed(PYMATGEN, "sites.1.abc", ...), id="pymatgen, cartesian"),
        pytest.param({**PYMATGEN, "@class": "IStructure"}, id="pymatgen, immutable"),
        pytest.param(OPTIMADE, id="OPTIMADE resource"),
        pytest.param(ATTRIBUTES, id="OPTIMADE attributes"),
        pytest.param(changed(ATTRIBUTES, "dimension_types", ...), id="OPTIMADE, number of dimensions"),
        pytest.param(
            {**changed(ATTRIBUTES, "species", ...), "species_at_sites": ["Si", "Si"]}, id="OPTIMADE, symbols alone"
        ),
    ],
)
def test_crystals(structure: Any) -> None:
    request = decode(structure)
    assert not request.errors
    assert same(request.structures, silicon())


@pytest.mark.parametrize(
    "structure",
    [
        pytest.param(MOLECULE, id="pymatgen"),
        pytest.param(QCSCHEMA, id="QCSchema"),
        pytest.param({"schema_name": "qcschema_input", "molecule": QCSCHEMA, "driver": "energy"}, id="QCSchema input"),
        pytest.param(
            {**QCSCHEMA, "geometry": np.reshape(QCSCHEMA["geometry"], (3, 3)).tolist()}, id="QCSchema, nested"
        ),
        pytest.param(
            {
                "cartesian_site_positions": WATER["positions"], "species_at_sites": WATER["symbols"],
                "lattice_vectors": None, "dimension_types": [0, 0, 0],
            },
            id="OPTIMADE",
        ),
    ],
)  # fmt: skip
def test_molecules(structure: Any) -> None:
    request = decode(structure)
    assert not request.errors
    assert request.structures.numbers.tolist() == [8, 1, 1]
    assert not request.structures.pbc.any()
    np.testing.assert_allclose(request.structures.positions, WATER["positions"], atol=1e-14)


def test_a_slab_with_a_null_vector() -> None:
    slab = {**ATTRIBUTES, "lattice_vectors": [*CELL[:2], [None] * 3]}
    for known in (changed(slab, "dimension_types", [1, 1, 0]), changed(slab, "dimension_types", ...)):
        known = changed(known, "nperiodic_dimensions", ...)
        request = decode(known)
        assert not request.errors
        assert request.structures.pbc.tolist() == [[True, True, False]]
        assert request.structures.cells[0, 2].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "structure",
    [
        pytest.param({**PYMATGEN, "temperature": 300}, id="pymatgen"),
        pytest.param({**PYMATGEN, "properties": {"temperature": 300}}, id="pymatgen properties"),
        pytest.param({**OPTIMADE, "temperature": 300}, id="OPTIMADE"),
        pytest.param({**QCSCHEMA, "temperature": 300}, id="QCSchema"),
    ],
)
def test_temperature(structure: Any) -> None:
    assert decode(structure).structures.temperatures.tolist() == [300.0]


def test_periodicity_that_pymatgen_did_not_write() -> None:
    request = decode(changed(PYMATGEN, "lattice.pbc", ...))
    assert request.structures.pbc.all()
    assert request.pbc_assumed is not None
    assert request.pbc_assumed.tolist() == [True]


HALF = [{"element": "Si", "occu": 0.5}, {"element": "Ge", "occu": 0.5}]
MIXED = [{"name": "Si1", "chemical_symbols": ["Si", "Ge"], "concentration": [0.5, 0.5]}]


@pytest.mark.parametrize(
    ("structure", "code", "words"),
    [
        pytest.param(changed(PYMATGEN, "sites.1.species", HALF), "ambiguous", "site 2 is not one whole", id="mixed"),
        pytest.param(changed(PYMATGEN, "sites.1.species.0.occu", 0.5), "ambiguous", "ordered", id="partial"),
        pytest.param(changed(PYMATGEN, "sites.1.species.0.occu", None), "ambiguous", "ordered", id="occupancy null"),
        pytest.param(changed(PYMATGEN, "sites.1.species.0.occu", True), "ambiguous", "ordered", id="occupancy true"),
        pytest.param(changed(PYMATGEN, "sites.1.species", []), "ambiguous", "vacancy", id="nothing on a site"),
        pytest.param(changed(PYMATGEN, "sites.1.species", 3), "bad_value", "site 2", id="species a number"),
        pytest.param(changed(PYMATGEN, "sites.1.species.0.element", "X0+"), "bad_value", "atom 2", id="dummy"),
        pytest.param(changed(PYMATGEN, "sites.1.abc", [0.3] * 3), "ambiguous", "Å apart", id="two positions"),
        pytest.param(changed(PYMATGEN, "sites.1", 3), "bad_value", "site 2", id="site a number"),
        pytest.param(changed(PYMATGEN, "sites", ...), "missing_field", "sites", id="no sites"),
        pytest.param(changed(PYMATGEN, "sites", {}), "bad_value", "sites must be a list", id="sites an object"),
        pytest.param(changed(PYMATGEN, "sites", []), "empty", "atom", id="empty sites"),
        pytest.param(changed(PYMATGEN, "lattice", ...), "missing_field", "lattice", id="no lattice"),
        pytest.param(changed(PYMATGEN, "lattice.matrix", ...), "missing_field", "matrix", id="no matrix"),
        pytest.param(changed(PYMATGEN, "lattice.matrix", [1]), "bad_shape", "cell", id="bad matrix"),
        pytest.param(changed(MOLECULE, "sites.0.xyz", ...), "missing_field", "xyz", id="molecule without xyz"),
        pytest.param({**PYMATGEN, "@class": "Slab"}, "bad_value", "Structure and Molecule", id="another class"),
        pytest.param({**PYMATGEN, "@class": []}, "bad_value", "Structure and Molecule", id="class a list"),
        pytest.param(changed(ATTRIBUTES, "species", MIXED), "ambiguous", "site 1", id="OPTIMADE mixed"),
        pytest.param(
            changed(ATTRIBUTES, "species.0.concentration", [0.9]), "ambiguous", "site 1", id="OPTIMADE partial"
        ),
        pytest.param(
            changed(ATTRIBUTES, "species.0.chemical_symbols", ["vacancy"]), "bad_value", "vacancy", id="vacancy"
        ),
        pytest.param(changed(ATTRIBUTES, "species.0.attached", ["H"]), "ambiguous", "group", id="attached"),
        pytest.param(changed(ATTRIBUTES, "species.0.name", "Si2"), "bad_value", "not in species", id="unknown name"),
        pytest.param(changed(ATTRIBUTES, "species", [3]), "bad_value", "name", id="species a number"),
        pytest.param(changed(ATTRIBUTES, "species", 3), "bad_value", "list", id="species no list"),
        pytest.param(changed(ATTRIBUTES, "species_at_sites", ["Si1"]), "bad_shape", "(1, 3)", id="one name"),
        pytest.param(changed(ATTRIBUTES, "species_at_sites", ...), "missing_field", "species_at_sites", id="no names"),
        pytest.param(
            changed(changed(ATTRIBUTES, "species", ...), "species_at_sites", ["Si1", "Si1"]), "bad_value", "'Si1'",
            id="labels without species",
        ),
        pytest.param(
            changed(ATTRIBUTES, "lattice_vectors", [[None] * 3, *CELL[:2]]), "singular_cell", "no vector",
            id="periodic without a vector",
        ),
        pytest.param(changed(ATTRIBUTES, "lattice_vectors", None), "singular_cell", "no cell", id="no vectors"),
        pytest.param(changed(ATTRIBUTES, "lattice_vectors", CELL[:2]), "bad_shape", "(3, 3)", id="two vectors"),
        pytest.param(changed(ATTRIBUTES, "dimension_types", [1, 1]), "bad_shape", "dimension_types", id="two types"),
        pytest.param(
            {**changed(ATTRIBUTES, "dimension_types", ...), "nperiodic_dimensions": 2}, "ambiguous",
            "which directions", id="two of three dimensions",
        ),
        pytest.param({**OPTIMADE, "type": "references"}, "bad_value", "structures are taken", id="another resource"),
        pytest.param({"attributes": {}}, "missing_field", "cartesian_site_positions", id="no positions"),
        pytest.param(changed(QCSCHEMA, "real", [True, False, True]), "ambiguous", "atom 2 is a ghost", id="ghost"),
        pytest.param(changed(QCSCHEMA, "geometry", [0.0] * 8), "bad_shape", "3 for each of 3", id="eight numbers"),
        pytest.param(changed(QCSCHEMA, "geometry", [0.0] * 6), "bad_shape", "(2, 3)", id="two atoms"),
        pytest.param(changed(QCSCHEMA, "geometry", [0.0] * 8 + [None]), "bad_value", "z of atom 3", id="null"),
        pytest.param(changed(QCSCHEMA, "geometry", 3), "bad_value", "list", id="geometry a number"),
        pytest.param(changed(QCSCHEMA, "symbols", ["o", "H", "H"]), "bad_value", "'O'", id="lower case"),
        pytest.param(changed(QCSCHEMA, "symbols", ...), "missing_field", "symbols", id="no symbols"),
        pytest.param({"schema_name": "qcschema_output"}, "missing_field", "geometry", id="no molecule"),
    ],
)  # fmt: skip
def test_what_is_refused(structure: Any, code: str, words: str) -> None:
    error = fault(structure)
    assert error.code == code, error.reason
    assert words in error.reason


def test_bohr_is_that_of_ase() -> None:
    units = pytest.importorskip("ase.units")
    assert abs(units.Bohr - BOHR) < 1e-12
