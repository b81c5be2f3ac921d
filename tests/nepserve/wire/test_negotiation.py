from __future__ import annotations

import pytest

from nepserve import wire

JSON, MSGPACK, XYZ, NPZ = "application/json", "application/msgpack", "chemical/x-extxyz", "application/x-npz"


@pytest.mark.parametrize(
    ("content_type", "answer"),
    [
        ("application/json", JSON),
        ("Application/JSON; charset=utf-8", JSON),
        ('application/json;charset="UTF-8"', JSON),
        ("application/json; version=2", JSON),
        ("application/msgpack", MSGPACK),
        ("application/x-msgpack", MSGPACK),
        ("application/vnd.msgpack", MSGPACK),
        ("chemical/x-xyz", XYZ),
        ("chemical/x-extxyz", XYZ),
        ("text/plain", XYZ),
        ("text/plain; charset=us-ascii", XYZ),
        ("application/x-npz", NPZ),
        ("application/zip", NPZ),
    ],
)
def test_an_answer_speaks_as_the_question_did(content_type: str, answer: str) -> None:
    for accept in (None, "", "*/*"):
        assert wire.negotiate(accept, content_type) == answer


@pytest.mark.parametrize(
    "content_type",
    [
        None, "", "application/x-www-form-urlencoded", "text/html", "json", "application/", "*/*", "application/json2",
        "application/json; charset=latin-1", "text/plain; charset=utf-16", "application/json, application/json",
        "multipart/form-data; boundary=x", "\x00", ";" * 1000,
    ],
)  # fmt: skip
def test_other_types_are_refused(content_type: str | None) -> None:
    with pytest.raises(wire.WireError) as caught:
        wire.decode(content_type, b"{}")
    assert (caught.value.status, caught.value.code) == (415, "unsupported_media_type")
    assert caught.value.extra["types"] == [JSON, MSGPACK, XYZ, NPZ]
    for name in (JSON, MSGPACK, XYZ, NPZ):
        assert name in caught.value.detail or "charset" in caught.value.detail


@pytest.mark.parametrize(
    ("accept", "answer"),
    [
        pytest.param("application/msgpack", MSGPACK, id="another"),
        pytest.param("application/json", JSON, id="the same"),
        pytest.param("application/*", JSON, id="a kind with its own"),
        pytest.param("chemical/*", XYZ, id="a kind without its own"),
        pytest.param("text/plain", "text/plain", id="a second name"),
        pytest.param("application/x-msgpack", "application/x-msgpack", id="another second name"),
        pytest.param("application/msgpack, application/json", JSON, id="its own among equals"),
        pytest.param("application/msgpack, application/json;q=0.9", MSGPACK, id="better than its own"),
        pytest.param("application/json;q=0.1, */*;q=0.5", MSGPACK, id="anything rather than its own"),
        pytest.param("application/x-npz, chemical/x-xyz", NPZ, id="first among equals"),
        pytest.param("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", JSON, id="browser"),
        pytest.param("application/json;q=0, application/*", MSGPACK, id="not its own"),
        pytest.param("*/*;q=0, application/x-npz", NPZ, id="nothing else"),
        pytest.param("nonsense, application/x-npz", NPZ, id="nonsense beside"),
        pytest.param("application/msgpack;q=2, application/x-npz;q=0.1", NPZ, id="quality out of range"),
        pytest.param("APPLICATION/MSGPACK ; Q=1.000", MSGPACK, id="capitals"),
        pytest.param("application/msgpack;charset=utf-8;q=0.5", MSGPACK, id="parameters"),
    ],
)
def test_accept(accept: str, answer: str) -> None:
    assert wire.negotiate(accept, JSON) == answer


@pytest.mark.parametrize(
    "accept",
    [
        "text/html", "image/*", "nonsense", "application/json;q=0", "*/*;q=0", "application/json;q=0.0000",
        "*/json", ",", "application/json;q=NaN", "text/html, image/png",
    ],
)  # fmt: skip
def test_nothing_acceptable(accept: str) -> None:
    with pytest.raises(wire.WireError) as caught:
        wire.negotiate(accept, JSON)
    assert (caught.value.status, caught.value.code) == (406, "not_acceptable")
    assert caught.value.extra["types"] == [JSON, MSGPACK, XYZ, NPZ]
