from __future__ import annotations

import copy
import json
import pickle

import pytest

from nepcore.errors import StructureError
from nepserve.client import (
    ConnectionFailed,
    InvalidAnswer,
    NepserveError,
    Overloaded,
    ServerError,
    StructureRejected,
    Timeout,
)
from nepserve.client.errors import from_answer


def answer(status, document, kind="application/problem+json", **headers):
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return from_answer(
        status, {"content-type": kind, **headers}, body, url="http://h:1", path="/v1/evaluate", request_id="r1"
    )


def test_a_problem_document_becomes_an_error_with_its_numbers():
    error = answer(413, {"code": "body_too_large", "detail": "too long", "max_bytes": 10, "request_id": "r2"})
    assert type(error) is ServerError
    assert (error.status, error.code, error.detail, error.request_id) == (413, "body_too_large", "too long", "r2")
    assert error.problem["max_bytes"] == 10
    assert error.url == "http://h:1"
    assert "http://h:1/v1/evaluate answered 413 (body_too_large: too long)" in str(error)


def test_a_problem_of_one_structure_is_a_rejection():
    error = answer(
        422,
        {
            "code": "unknown_element",
            "detail": "structure 3: atom 2: Ge",
            "field": "numbers",
            "atoms": [1],
            "structure": 2,
        },
    )
    assert type(error) is StructureRejected
    assert (error.code, error.reason, error.field, error.atoms, error.index) == (
        "unknown_element", "atom 2: Ge", "numbers", (1,), 2,
    )  # fmt: skip
    assert str(error) == "structure 3: atom 2: Ge (unknown_element)"


def test_a_structure_too_large_for_the_device_is_a_rejection_with_the_limit():
    error = answer(413, {"code": "too_large", "detail": "900 atoms", "max_atoms": 500})
    assert isinstance(error, StructureRejected)
    assert error.problem["max_atoms"] == 500


def test_a_bad_value_of_the_request_is_not_blamed_on_the_structure():
    error = answer(422, {"code": "bad_value", "detail": "model must be a string", "field": "model"})
    assert type(error) is ServerError


@pytest.mark.parametrize("status", [429, 502, 503])
def test_no_room(status):
    error = answer(status, {"code": "queue_full", "detail": "full"}, **{"retry-after": "7"})
    assert isinstance(error, Overloaded)
    assert isinstance(error, ServerError)
    assert error.retry_after == 7.0


def test_a_deadline_that_passed_on_the_server_is_a_timeout():
    assert isinstance(answer(504, {"code": "deadline_passed", "detail": "late"}), Timeout)


def test_a_fault_of_the_server_names_the_request():
    assert "request id r1" in str(answer(500, {"code": "internal", "detail": "oops"}))


def test_the_id_in_the_header_wins():
    error = answer(500, {"code": "internal"}, **{"x-request-id": "r9"})
    assert error.request_id == "r9"


def test_a_wrong_key_is_explained():
    assert "api_key" in str(answer(401, {"code": "unauthorized", "detail": "no"}))


def test_a_page_of_a_proxy_is_quoted_without_its_markup():
    page = b"<html><head><style>p{}</style><title>502</title></head><body><h1>Bad  Gateway</h1></body></html>"
    error = answer(502, page, "text/html", server="nginx")
    assert isinstance(error, Overloaded)
    assert "502 Bad Gateway" in str(error)
    assert "nginx" in str(error)
    assert "proxy" in str(error)
    assert "<" not in str(error)


def test_an_error_of_another_program_is_told_apart():
    error = answer(404, b"Not Found", "text/plain")
    assert type(error) is ServerError
    assert error.code == ""
    assert "not in nepserve's form" in str(error)


@pytest.mark.parametrize(
    "body",
    [b"{", b"[1]", b'"x"', b"null", b"\xff\xfe", b"", b'{"code": 5, "detail": [], "atoms": "x", "structure": "y"}'],
)
@pytest.mark.parametrize("status", [400, 413, 422, 429, 500, 504])
def test_any_body_of_an_error_is_understood_or_quoted(status, body):
    assert isinstance(answer(status, body), NepserveError)


def test_a_redirect_names_its_target_and_is_not_followed():
    error = answer(307, b"", "text/html", location="https://elsewhere/")
    assert type(error) is ServerError
    assert "https://elsewhere/" in str(error)


ERRORS = [
    NepserveError("m", url="u", request_id="r"),
    ConnectionFailed("m", url="u", attempts=4),
    Timeout("m", url="u", seconds=2.0),
    InvalidAnswer("m", url="u", request_id="r"),
    ServerError("m", status=500, code="c", detail="d", url="u", request_id="r", problem={"a": 1}),
    answer(429, {"code": "queue_full", "detail": "full"}, **{"retry-after": "7"}),
    StructureRejected("c", "r", field="cell", atoms=(1, 2), index=4, url="u", request_id="i", problem={"b": 2}),
    StructureRejected.of(StructureError("empty", "no atoms", field="positions"), index=1, url="u"),
    NepserveError("m").concerning(range(3, 9)),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("way", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_errors_travel_between_processes(error, way):
    found = way(error)
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert found.__dict__ == error.__dict__


def test_which_structures_a_body_carried_is_said_from_one():
    error = NepserveError("m").concerning(range(3, 9))
    assert str(error) == "structures 4 to 9: m"
    assert error.structures == range(3, 9)
    assert str(NepserveError("m").concerning(range(3, 4))) == "structure 4: m"
