"""Bytes that nobody meant: whatever comes, only :class:`WireError` goes, and what is decoded can be answered."""

from __future__ import annotations

import io
import json
import random
import warnings
import zipfile
from typing import TYPE_CHECKING

import msgpack
import numpy as np
import orjson
import pytest

from nepcore.admission import Admission
from nepcore.files import xyz
from nepcore.structures import Predictions
from nepserve import wire
from nepserve.wire.msgpack_format import pack_request, unpack_result
from wire_samples import CELL, SILICON, WATER, mixed, predict, silicon

if TYPE_CHECKING:
    from collections.abc import Callable

    from nepcore.structures import Structures

LIMITS = wire.Limits(max_body=1 << 20, max_structures=1000, max_atoms=10_000)
DOOR = Admission(("Si", "O", "H"), False, 5.0)
ACCEPTED = ("application/json", "application/msgpack", "application/x-npz", "chemical/x-extxyz")


def npz() -> bytes:
    block = mixed()
    file = io.BytesIO()
    np.savez(
        file, n_atoms=block.counts, numbers=block.numbers, positions=block.positions, cell=block.cells, pbc=block.pbc
    )
    return file.getvalue()


def npz_deflated() -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, numbers=[14, 14], positions=np.array(SILICON["positions"], ">f4"), model="m")
    return file.getvalue()


PYMATGEN = {
    "@class": "Structure", "lattice": {"matrix": CELL, "pbc": [True, True, True]},
    "sites": [{"species": [{"element": "Si", "occu": 1}], "abc": [0, 0, 0], "xyz": [0, 0, 0], "properties": {}}],
}  # fmt: skip
OPTIMADE = {
    "type": "structures",
    "attributes": {
        "lattice_vectors": CELL, "cartesian_site_positions": [[0, 0, 0]], "species_at_sites": ["a"],
        "species": [{"name": "a", "chemical_symbols": ["Si"], "concentration": [1.0]}], "dimension_types": [1, 1, 1],
    },
}  # fmt: skip
QCSCHEMA = {"schema_name": "qcschema_molecule", "symbols": ["H", "H"], "geometry": [0, 0, 0, 0, 0, 1.4], "real": [True]}

SEEDS: dict[str, list[bytes]] = {
    "application/json": [
        json.dumps({"model": "a", "structure": SILICON, "properties": ["energy", "forces"]}).encode(),
        json.dumps({"structures": [SILICON, WATER, {"numbers": [1], "positions": [[1e9, -2.5, 3]]}]}).encode(),
        json.dumps({"structures": [PYMATGEN, OPTIMADE, QCSCHEMA]}).encode(),
    ],
    "application/msgpack": [
        pack_request(mixed(), ["energy", "virial"], "m"),
        pack_request(silicon(), dtype="f4", single=True),
        msgpack.packb({
            "n_atoms": [2, 1], "numbers": [14, 14, 1], "positions": [[0, 0, 0], [1, 1, 1.5], [2, 0, 0]],
            "cell": [CELL, CELL], "pbc": [[True] * 3, [False] * 3], "temperature": [None, 3],
        }),
    ],
    "application/x-npz": [npz(), npz_deflated()],
    "chemical/x-extxyz": [
        xyz.dumps(mixed()),
        b'2\nLattice="3 0 0 0 3 0 0 0 3" Properties=species:S:1:pos:R:3:id:I:1 pbc="T T F"\nSi 0 0 0 1\nO 1 1 1 2\n',
    ],
}  # fmt: skip

WORDS: dict[str, list[bytes]] = {
    "application/json": [
        b"NaN", b"Infinity", b"-Infinity", b"1e999", b"null", b"true", b'"1.5"', b"[]", b"{}", b"[[", b"]]", b'":',
        b'"\\ud800"', b"\xff", b"\xef\xbb\xbf", b'"numbers":', b'"positions":', b'"cell":', b'"pbc":', b"," * 9,
        b"9" * 400, b"-0", b"1e-999", b'"@class":', b'"geometry":', b'"attributes":', b"\x00", b"[" * 2000, b'"',
    ],
    "application/msgpack": [
        b"\xc0", b"\xc1", b"\xc2", b"\xc3", b"\xcb\x7f\xf8\0\0\0\0\0\0", b"\xdd\xff\xff\xff\xff", b"\xdf\0\0\0\xff",
        b"\xc6\xff\xff\xff\xff", b"\xc9\0\0\0\1\3a", b"\xd6\xff\0\0\0\0", b"\xcf" + b"\xff" * 8, b"\xd3" + b"\x80" * 8,
        b"\x91" * 1100, b"\xa5dtype\xa2f4", b"\xa7n_atoms", b"\x90", b"\x80", b"\xa0", b"\xc4\0",
    ],
    "application/x-npz": [
        b"PK\1\2", b"PK\3\4", b"PK\5\6", b"\x93NUMPY\1\0", b"\x93NUMPY\3\0", b"'descr': '|O'", b"'<f8'", b"'<U9'",
        b"(", b"-" * 40, b"True", b"\xff\xff\xff\xff", b"numbers.npy", b"pbc.npy", b"9" * 30,
    ],
    "chemical/x-extxyz": [
        b"\n", b"\r\n", b'"', b"=", b"nan", b"1e999", b"Lattice", b"pbc=", b"Properties=", b":R:", b"99999999", b"-1",
        b"\xff", b"\0", b"\\", b"{", b"[1,2]", b"\x1f\x8b", b"species:S:1:pos:R:3", b"T", b"X",
    ],
}  # fmt: skip


def mutant(rng: random.Random, seed: bytes, words: list[bytes]) -> bytes:
    """One to six small changes: bytes flipped, pieces cut, doubled, moved, or words put in."""
    data = bytearray(seed)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data) + 1)
        span = rng.choice((1, 1, 2, 4, 8, 30))
        match rng.randrange(7):
            case 0 if data:
                data[at % len(data)] = rng.randrange(256)
            case 1 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 2:
                del data[at : at + span]
            case 3:
                data[at:at] = data[at : at + span]
            case 4:
                data[at : at + rng.choice((0, span))] = rng.choice(words)
            case 5:
                other = rng.randrange(len(data) + 1)
                data[at:at] = data[other : other + span]
            case _:
                data = data[:at] if rng.random() < 0.2 else data
    return bytes(data)


def answer(request: wire.Request, rng: random.Random) -> None:
    """What was decoded is as whole as it claims, and can be answered in some format."""
    block = request.structures
    assert len(block) <= LIMITS.max_structures
    assert block.n_atoms <= LIMITS.max_atoms
    assert all(0 <= i < len(block) for i in request.errors)
    faults = {**DOOR.problems(block), **request.errors}
    if request.single and faults:
        problem = wire.WireError.from_structure(faults[0]).problem("r")
        orjson.dumps(problem)
        return
    with np.errstate(all="ignore"):
        results = predict(block, request.properties)
    results = Predictions(results.counts, results.values, results.stress_known, dict(faults))
    accept = rng.choice(ACCEPTED)
    data = wire.encode(request, results, accept)[1]
    if accept == "application/json":
        orjson.loads(data)
    elif accept == "application/msgpack":
        found = unpack_result(data, block.counts)
        assert set(found.errors) >= set(faults)


def attack(content_type: str, count: int, seed: int, make: Callable[[random.Random], bytes]) -> tuple[int, int]:
    """Bodies taken and refused."""
    rng = random.Random(seed)
    taken = refused = 0
    statuses: set[int] = set()
    for _ in range(count):
        data = make(rng)
        try:
            request = wire.decode(content_type, data, limits=LIMITS)
            answer(request, rng)
            taken += 1
        except wire.WireError as error:
            statuses.add(orjson.loads(orjson.dumps(error.problem("r")))["status"])
            refused += 1
        except Exception as error:
            pytest.fail(f"{type(error).__name__}: {error}, for {content_type} {data[:2000]!r}")
    assert all(400 <= status < 500 for status in statuses)
    return taken, refused


@pytest.fixture(params=[pytest.param(4500, id="short"), pytest.param(45_000, id="long", marks=pytest.mark.slow)])
def count(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.mark.parametrize("content_type", list(SEEDS))
def test_mutants(content_type: str, count: int) -> None:
    seeds, words = SEEDS[content_type], WORDS[content_type]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        taken, refused = attack(content_type, count, count, lambda rng: mutant(rng, rng.choice(seeds), words))
    # Both happen, or the changes are too small or too large to test anything.
    assert taken > count // 200
    assert refused > count // 4


@pytest.mark.parametrize("content_type", list(SEEDS))
def test_noise(content_type: str, count: int) -> None:
    words = WORDS[content_type]

    def make(rng: random.Random) -> bytes:
        if rng.random() < 0.5:
            return rng.randbytes(rng.randrange(60))
        return b"".join(rng.choices(words, k=rng.randrange(12)))

    taken, refused = attack(content_type, count // 9, count, make)
    assert taken + refused == count // 9


def test_members_of_archives(count: int) -> None:
    """Mutants inside an intact archive, which bytes changed at random rarely leave."""
    members = {}
    with zipfile.ZipFile(io.BytesIO(npz())) as archive:
        for name in archive.namelist():
            members[name] = archive.read(name)

    def make(rng: random.Random) -> bytes:
        chosen = rng.choice(list(members))
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            for name, content in members.items():
                changed = mutant(rng, content, WORDS["application/x-npz"]) if name == chosen else content
                archive.writestr(name, changed)
        return file.getvalue()

    taken, refused = attack("application/x-npz", count // 9, count, make)
    assert taken > 0
    assert refused > 0


@pytest.mark.parametrize("seed", range(3))
def test_answers_for_clients(seed: int) -> None:
    block = mixed()
    request = wire.decode("application/msgpack", pack_request(block, ["energy", "forces", "stress", "descriptors"]))
    good = wire.encode(request, predict(block))[1]
    rng = random.Random(seed)
    codes = {reading(mutant(rng, good, WORDS["application/msgpack"]), block) for _ in range(300)}
    assert codes == {"read", "bad_answer"}


def reading(data: bytes, block: Structures) -> str:
    try:
        found = unpack_result(data, block.counts)
    except wire.WireError as error:
        return error.code
    assert len(found) == len(block)
    return "read"
