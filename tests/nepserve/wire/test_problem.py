from __future__ import annotations

import re
from http import HTTPStatus
from pathlib import Path

import pytest

from nepcore.errors import StructureError
from nepserve import wire
from nepserve.wire.problem import CODES, OTHER_STATUS, STATUS_NUMBERS, problem

ERRORS = Path(__file__).resolve().parents[3] / "docs" / "errors.md"


def line(word: str) -> str:
    code = CODES[word]
    extras = ", ".join(f"`{name.strip()}`" for name in code.extras.split(",") if name)
    number = [] if code.number is None else [str(code.number)]
    return "| " + " | ".join([f"`{word}`", *number, str(code.status), code.title, extras]) + " |"


def test_the_documentation_has_the_table_of_codes() -> None:
    text = ERRORS.read_text(encoding="utf-8")
    found = [row for row in text.splitlines() if row.startswith("| `")]
    wanted = [line(word) for word, code in CODES.items() if code.number is not None]
    wanted += [line(word) for word, code in CODES.items() if code.number is None]
    missing = [row for row in wanted if row not in found]
    assert not missing, "docs/errors.md lacks these lines:\n" + "\n".join(missing)
    assert [row for row in found if row not in wanted] == []


@pytest.mark.parametrize("word", list(CODES))
def test_codes_are_words_with_a_status_of_http(word: str) -> None:
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", word)
    assert HTTPStatus(CODES[word].status) >= 400


def test_numbers_of_codes_stay() -> None:
    # Clients in other languages have these written down: add to the end, never change one.
    assert STATUS_NUMBERS == {
        "non_finite": 1, "out_of_range": 2, "bad_shape": 3, "bad_value": 4, "unknown_element": 5, "singular_cell": 6,
        "coincident_atoms": 7, "too_dense": 8, "too_large": 9, "missing_temperature": 10, "non_finite_result": 11,
        "out_of_memory": 12, "empty": 13, "unknown_field": 14, "missing_field": 15, "ambiguous": 16,
    }  # fmt: skip
    assert OTHER_STATUS not in STATUS_NUMBERS.values()


def test_every_code_of_nepcore_is_in_the_table() -> None:
    documented = re.findall(r"``([a-z_]+)``", (StructureError.__doc__ or "").split("Codes:")[1])
    assert len(documented) > 10
    assert set(documented) <= STATUS_NUMBERS.keys()


def test_a_problem_document() -> None:
    assert problem(None, "queue_full", None, "12 requests wait", "r-1", retry_after=0.5, max_atoms=None) == {
        "type": "urn:nepserve:problem:queue_full",
        "title": CODES["queue_full"].title,
        "status": 429,
        "code": "queue_full",
        "detail": "12 requests wait",
        "request_id": "r-1",
        "retry_after": 0.5,
    }
    assert problem(400, "bad_json", "No", "x") == {
        "type": "urn:nepserve:problem:bad_json", "title": "No", "status": 400, "code": "bad_json", "detail": "x",
    }  # fmt: skip


def test_the_fault_of_a_structure_as_a_problem() -> None:
    error = StructureError("coincident_atoms", "atoms 1 and 3 are at the same place", field="positions", atoms=(0, 2))
    alone = wire.WireError.from_structure(error).problem()
    assert (alone["status"], alone["field"], alone["atoms"]) == (422, "positions", [0, 2])
    assert "structure" not in alone
    among = wire.WireError.from_structure(error, 4).problem("r")
    assert among["structure"] == 4
    assert among["detail"] == "structure 5: atoms 1 and 3 are at the same place"
    assert wire.WireError.from_structure(StructureError("something_new", "x")).code == "bad_value"
