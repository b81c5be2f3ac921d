"""Public reports over HTTP: a real server with its real engine gives the stated values, or names the fault.

After every one of them it still answers the two-atom silicon cell.
"""

from __future__ import annotations

import io
import itertools
import json
import re
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest

import cases
import references
from locations import needs_shared
from nepcore.files import xyz
from nepserve.wire import msgpack_format
from servers import running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nepcore import Structures
    from servers import ServerProcess

pytestmark = needs_shared

XYZ = {"Content-Type": "chemical/x-extxyz", "Accept": "application/json"}
EVERYTHING = ["energy", "forces", "stress", "virial", "energies", "virials"]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    models = [f"si={cases.TOY_SI}", f"nacl={cases.TOY_NACL}"]
    models += [str(references.load(name).path) for name in ("PbTe_NEP4", "synth_nep4_temperature")]
    with running(
        loader="nepcore:load", models=models, default_model="si", dtype="float64", device="cpu", backend="loop"
    ) as process:
        yield process.ready(60)


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    """A client; at the end the server must be as well as at the start."""
    with httpx.Client(base_url=server.url, timeout=60) as link:
        yield link
        answer = link.post("/v1/evaluate", content=cases.file(14, "header-a.extxyz").read_bytes(), headers=XYZ)
        assert answer.status_code == 200
        assert results(answer)[0]["energy"] == pytest.approx(cases.SI2, abs=1e-7)
        assert link.get("/readyz").status_code == 200


def results(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return body.get("results", [body])


def post_file(client: httpx.Client, case: int, name: str, **query: str) -> httpx.Response:
    query.setdefault("properties", ",".join(EVERYTHING))
    return client.post("/v1/evaluate", params=query, content=cases.file(case, name).read_bytes(), headers=XYZ)


def silicon(**changes: Any) -> dict[str, Any]:
    """The two-atom cell as JSON."""
    (s,) = xyz.read(cases.file(14, "header-a.extxyz")).structures
    return {"symbols": ["Si", "Si"], "positions": s.positions.tolist(), "cell": s.cell.tolist(), **changes}


def problem(answer: httpx.Response) -> dict[str, Any]:
    """A client error as the product promises it: a problem document that says what is wrong."""
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text)
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert body["status"] == answer.status_code
    assert body["code"]
    assert body["request_id"]
    return body


@pytest.mark.parametrize(
    ("case", "name"),
    [
        *((14, f"header-{letter}.extxyz") for letter in "abcde"),
        (18, "no-pbc-key.extxyz"),
        (19, "no-lattice.extxyz"),
        (19, "zero-lattice.extxyz"),
        (29, "si-111.extxyz"),
        (31, "unwrapped.extxyz"),
        (31, "negative.extxyz"),
        (32, "no-cell.extxyz"),
        (32, "dummy-1A-cell.extxyz"),
        (37, "far-away.extxyz"),
        (39, "left-handed.extxyz"),
    ],
)
def test_stated_values(client: httpx.Client, case: int, name: str) -> None:
    text = cases.expected(14 if case == 18 else case)
    (found,) = results(post_file(client, case, name))
    assert found["energy"] == pytest.approx(cases.energy(text), abs=1e-6)
    assert np.abs(np.array(found["forces"]) - cases.forces(text)).max() < 1e-6
    assert np.abs(cases.six(np.array(found["virial"])) - cases.virial(text)).max() < 1e-6
    assert ("stress" in found) == ("volume" in text)
    assert ("stress" in found.get("unavailable", [])) == ("volume" not in text)


def test_the_periodicity_used_is_visible(client: httpx.Client) -> None:
    (from_file,) = results(post_file(client, 18, "no-pbc-key.extxyz"))
    (from_json,) = results(client.post("/v1/evaluate", json={"structure": silicon()}))
    assert from_file["energy"] == pytest.approx(cases.SI2, abs=1e-7)
    assert from_json["energy"] == pytest.approx(cases.SI2, abs=1e-7)
    assert from_json["pbc"] == [True, True, True]
    zero = {"symbols": ["Si"], "positions": [[0, 0, 0]], "cell": np.zeros((3, 3)).tolist(), "pbc": True}
    assert problem(client.post("/v1/evaluate", json={"structure": zero}))["code"] == "singular_cell"


@pytest.mark.parametrize("name", ["same-place", "image-on-top", "almost-same-place"])
def test_coincident_atoms(client: httpx.Client, name: str) -> None:
    (s,) = xyz.read(cases.file(43, f"{name}.extxyz")).structures
    bad = {"symbols": s.symbols, "positions": s.positions.tolist(), "cell": s.cell.tolist()}
    found = problem(client.post("/v1/evaluate", json={"structure": bad}))
    assert (found["code"], found["status"]) == ("coincident_atoms", 422)
    assert "atoms 1 and 2 coincide" in found["detail"]
    good, wrong, again = results(client.post("/v1/evaluate", json={"structures": [silicon(), bad, silicon()]}))
    assert wrong["error"]["code"] == "coincident_atoms"
    assert "energy" not in wrong
    assert good["energy"] == again["energy"] == pytest.approx(cases.SI2, abs=1e-7)


NOT_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "null", '"1.5"', "true", "[1.5]"]


@pytest.mark.parametrize("token", NOT_NUMBERS)
@pytest.mark.parametrize("field", ["positions", "cell"])
def test_what_is_no_finite_number(client: httpx.Client, token: str, field: str) -> None:
    body = silicon()
    body[field] = [list(row) for row in body[field]]
    body[field][1][2] = "@"
    text = json.dumps({"structure": body}).replace('"@"', token)
    found = problem(client.post("/v1/evaluate", content=text, headers={"Content-Type": "application/json"}))
    assert field in json.dumps(found)
    if field == "positions":
        assert re.search(r"atom 2|\[1\]", found["detail"]), found


def test_no_finite_number_in_binary(client: httpx.Client) -> None:
    block = xyz.read(cases.file(14, "header-a.extxyz")).structures
    good = msgpack_format.pack_request(block, ["energy"], None, "f8")
    spot = good.index(block.positions.tobytes()) + 8 * 4
    for pattern in (np.nan, np.inf):
        bad = good[:spot] + np.float64(pattern).tobytes() + good[spot + 8 :]
        answer = client.post("/v1/evaluate", content=bad, headers={"Content-Type": "application/msgpack"})
        assert b"non_finite" in answer.content
        assert b"atom 2" in answer.content
    for name in ("nan-position.extxyz", "inf-lattice.extxyz"):
        found = problem(post_file(client, 25, name))
        assert "line" in found["detail"]


WRONG_SHAPES = {
    "flat list": [0.0] * 9,
    "two columns": [[0.0, 1.0]] * 3,
    "one too few": [[0.0, 0.0, 0.0], [2.0, 0.0, 0.0]],
    "three by three transposed by hand": [[0.0, 1.0, 2.0, 3.0]] * 3,
    "ragged": [[0.0, 0.0, 0.0], [2.0, 0.0], [4.0, 0.0, 0.0]],
    "not a list": 7,
}


@pytest.mark.parametrize("positions", WRONG_SHAPES.values(), ids=WRONG_SHAPES.keys())
def test_wrong_shapes(client: httpx.Client, positions: object) -> None:
    found = problem(client.post("/v1/evaluate", json={"structure": {"symbols": ["Si"] * 3, "positions": positions}}))
    assert "positions" in found["detail"]
    assert re.search(r"\(n, 3\)|\(3, 3\)|3 numbers|three numbers|3 rows|3 positions|3 species", found["detail"]), found


def test_rows_are_atoms_and_cell_vectors(client: httpx.Client) -> None:
    (three,) = results(post_file(client, 26, "three-atoms.extxyz"))
    (skew,) = results(post_file(client, 26, "nonsymmetric-cell.extxyz"))
    assert three["energy"] == pytest.approx(-4.44590737, abs=1e-7)
    assert skew["energy"] == pytest.approx(-2.95665218, abs=1e-7)
    (s,) = xyz.read(cases.file(26, "nonsymmetric-cell.extxyz")).structures
    body = {"numbers": s.numbers.tolist(), "positions": s.positions.tolist(), "cell": s.cell.tolist()}
    assert results(client.post("/v1/evaluate", json={"structure": body}))[0]["energy"] == skew["energy"]


@pytest.mark.parametrize(
    "species",
    [["si", "si"], ["SI", "SI"], ["Si1", "Si2"], ["14", "14"], [" Si", "Si "], ["Ge", "Si"], ["", "Si"], ["X", "Si"]],
    ids=str,
)
def test_species_are_exact_symbols(client: httpx.Client, species: list[str]) -> None:
    found = problem(client.post("/v1/evaluate", json={"structure": silicon(symbols=species)}))
    assert "atom 1" in found["detail"]
    assert species[0] in found["detail"]
    if species[0] == "Ge":
        assert found["code"] == "unknown_element"
        assert re.search(r"\bSi\b", found["detail"])


def test_species_as_numbers(client: httpx.Client) -> None:
    body = silicon(numbers=[14, 14])
    del body["symbols"]
    assert results(client.post("/v1/evaluate", json={"structure": body}))[0]["energy"] == pytest.approx(cases.SI2)
    body["numbers"] = [0, 1]
    assert "atom 1" in problem(client.post("/v1/evaluate", json={"structure": body}))["detail"]
    body["numbers"] = [14, 1]
    assert problem(client.post("/v1/evaluate", json={"structure": body}))["code"] == "unknown_element"


def test_four_kinds_of_periodicity_in_one_batch(client: httpx.Client) -> None:
    wanted = {"crystal": -0.77743170, "slab": -4.49633935, "wire": -2.91960885, "molecule": -4.44590737}
    texts = {name: cases.file(34, f"{name}.extxyz").read_text() for name in wanted}
    for order in itertools.islice(itertools.permutations(wanted), 0, 24, 5):
        answer = client.post("/v1/evaluate", content="".join(texts[n] for n in order), headers=XYZ)
        found = results(answer)
        assert [r["energy"] for r in found] == pytest.approx([wanted[n] for n in order], abs=1e-6)
        assert [("stress" in r) for r in found] == [n == "crystal" for n in order]


def test_a_dense_clump_and_drifted_atoms(client: httpx.Client) -> None:
    (clump,) = results(post_file(client, 46, "dense-clump.extxyz"))
    assert clump["energy"] == pytest.approx(7.70331584, rel=1e-5)
    for name in ("thousand-cells", "hundred-thousand-cells"):
        (drifted,) = results(post_file(client, 49, f"{name}.extxyz"))
        assert drifted["energy"] == pytest.approx(cases.SI2, abs=1e-6)


def test_the_order_of_requests_does_not_matter(client: httpx.Client) -> None:
    first = results(post_file(client, 14, "header-a.extxyz"))
    post_file(client, 29, "si-444.extxyz")
    post_file(client, 75, "unwrapped-water-like.extxyz", model="nacl")
    post_file(client, 41, "two-far-atoms.extxyz")
    post_file(client, 43, "same-place.extxyz")
    post_file(client, 29, "si-222.extxyz")
    assert results(post_file(client, 14, "header-a.extxyz")) == first


def test_unwrapped_coordinates_of_a_driver(client: httpx.Client) -> None:
    (found,) = results(post_file(client, 75, "unwrapped-water-like.extxyz", model="nacl"))
    text = cases.expected(75)
    assert found["energy"] == pytest.approx(cases.energy(text), abs=1e-6)
    assert np.abs(np.array(found["forces"]) - cases.forces(text)).max() < 1e-6


def test_faulty_files_are_refused_with_frame_and_line(client: httpx.Client) -> None:
    for case, name, words in [
        (12, "bad-energy.xyz", ("frame 3", "line 10", "energy")),
        (12, "bad-coordinate.xyz", ("frame 2", "line 8", "1.25.75")),
        (23, "short-last-frame.xyz", ("frame 3",)),
    ]:
        found = problem(post_file(client, case, name))
        for word in words:
            assert word in found["detail"], (name, found["detail"])
    for name in ("crlf.xyz", "no-final-newline.xyz", "trailing-blanks.xyz"):
        assert len(results(post_file(client, 23, name))) == 3


ODD_BODIES = {
    "empty": (b"", 400),
    "not JSON": (b"energy please", 400),
    "a list": (b"[1, 2]", 422),
    "no structure": (b"{}", 422),
    "both": (b'{"structure": {}, "structures": []}', 422),
    "duplicate keys": (b'{"structure": {"symbols": ["Si"], "symbols": ["Si"], "positions": [[0,0,0]]}}', 4),
    "duplicate structure": (b'{"model": "si", "model": "nacl", "structures": []}', 4),
    "unknown field": (b'{"structure": {"symbols": ["Si"], "positions": [[0,0,0]], "lattice": [1]}}', 422),
    "huge number": (b'{"structure": {"numbers": [99999999999999999999999], "positions": [[0,0,0]]}}', 4),
    "huge coordinate": (b'{"structure": {"symbols": ["Si"], "positions": [[1e300,0,0]]}}', 422),
    "no atoms": (b'{"structure": {"symbols": [], "positions": []}}', 422),
    "unknown property": (b'{"structure": {"symbols": ["Si"], "positions": [[0,0,0]]}, "properties": ["charge"]}', 422),
    "unknown model": (b'{"model": "germanium", "structure": {"symbols": ["Si"], "positions": [[0,0,0]]}}', 404),
    "deeply nested": (b'{"structure":' + b"[" * 100_000, 4),
    "not UTF-8": (b'{"model": "\xff"}', 400),
}


@pytest.mark.parametrize(("body", "status"), ODD_BODIES.values(), ids=ODD_BODIES.keys())
def test_odd_bodies(client: httpx.Client, body: bytes, status: int) -> None:
    answer = client.post("/v1/evaluate", content=body, headers={"Content-Type": "application/json"})
    found = problem(answer)
    assert str(answer.status_code).startswith(str(status)), found
    assert found["detail"]


def test_no_structures_are_no_results(client: httpx.Client) -> None:
    assert results(client.post("/v1/evaluate", json={"structures": []})) == []


def test_temperature_in_every_format(client: httpx.Client) -> None:
    reference = references.load("synth_nep4_temperature")
    wanted = [float(r["energy"]) for r in reference.results[:3]]
    block = reference.structures.slice(0, 3)
    for kind, body in bodies(block, "synth_nep4_temperature").items():
        named_inside = "json" in kind or "msgpack" in kind
        query = {} if named_inside else {"model": "synth_nep4_temperature", "properties": "energy"}
        headers = {"Content-Type": kind, "Accept": "application/json"}
        found = results(client.post("/v1/evaluate", params=query, content=body, headers=headers))
        assert [r["energy"] for r in found] == pytest.approx(wanted, rel=1e-10), kind
    structure = {"symbols": block.view(0).symbols, "positions": block.view(0).positions.tolist()}
    missing = client.post("/v1/evaluate", json={"model": "synth_nep4_temperature", "structure": structure})
    assert (problem(missing)["code"], missing.status_code) == ("missing_temperature", 422)


def bodies(block: Structures, model: str) -> dict[str, bytes]:
    """A block in every format."""
    items = [
        {"numbers": s.numbers.tolist(), "positions": s.positions.tolist(), "cell": s.cell.tolist(),
         "pbc": s.pbc.tolist(), **({} if s.temperature is None else {"temperature": s.temperature})}
        for s in block
    ]  # fmt: skip
    archive = io.BytesIO()
    np.savez(
        archive, n_atoms=block.counts, numbers=block.numbers, positions=block.positions, cell=block.cells,
        pbc=block.pbc, temperature=block.temperatures,
    )  # fmt: skip
    return {
        "application/json": json.dumps({"model": model, "structures": items, "properties": EVERYTHING}).encode(),
        "application/msgpack": msgpack_format.pack_request(block, EVERYTHING, model, "f8"),
        "chemical/x-extxyz": xyz.dumps(block),
        "application/x-npz": archive.getvalue(),
    }


@pytest.mark.parametrize("kind", ["application/json", "application/msgpack", "chemical/x-extxyz", "application/x-npz"])
def test_reference_values_in_every_format(client: httpx.Client, kind: str) -> None:
    reference = references.load("PbTe_NEP4")
    body = bodies(reference.structures, "PbTe_NEP4")[kind]
    named_inside = "json" in kind or "msgpack" in kind
    query = {} if named_inside else {"model": "PbTe_NEP4", "properties": ",".join(EVERYTHING)}
    headers = {"Content-Type": kind, "Accept": "application/json"}
    found = results(client.post("/v1/evaluate", params=query, content=body, headers=headers))
    assert len(found) == len(reference.results)
    for label, wanted, result in zip(reference.labels, reference.results, found, strict=True):
        for name, value in wanted.items():
            if name != "descriptors":
                error = np.abs(np.array(result[name]) - value).max() if value.size else 0.0
                assert error <= 1e-10 * max(1.0, float(np.abs(value).max(initial=0.0))), (label, name)
