"""The page on wire formats and the models of the API document say what the decoders do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgpack
import pytest
from pydantic import BaseModel, ValidationError

from nepcore.errors import StructureError
from nepcore.structures import PROPERTIES
from nepserve import wire
from nepserve.wire import json_format, json_schema, json_structure, msgpack_format, npz_format
from nepserve.wire.negotiation import TYPES
from wire_samples import SILICON, WATER, mixed, predict

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "wire.md").read_text(encoding="utf-8")
EXAMPLES = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)]
REQUESTS = [example for example in EXAMPLES if example.keys() & {"structure", "structures"}]
ANSWERS = [example for example in EXAMPLES if not example.keys() & {"structure", "structures"}]


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def keys(text: str) -> set[str]:
    """Keys in the first column of the tables of a text."""
    cells = [row.split("|")[1] for row in text.splitlines() if row.startswith("| `")]
    return {key for cell in cells for key in re.findall(r"`([a-z_]+)`", cell)}


def decode(body: Any) -> wire.Request:
    return wire.decode("application/json", json.dumps(body).encode())


def test_there_are_examples() -> None:
    assert len(REQUESTS) == 2
    assert len(ANSWERS) == 2


@pytest.mark.parametrize("body", REQUESTS)
def test_documented_requests_are_taken(body: Any) -> None:
    request = decode(body)
    assert not request.errors
    assert not request.structures.problems()
    json_schema.EvaluateRequest.model_validate(body, strict=True)


def test_documented_answers_are_those_of_the_models() -> None:
    json_schema.EvaluateAnswer.model_validate(ANSWERS[0], strict=True)
    json_schema.EvaluateAnswers.model_validate(ANSWERS[1], strict=True)
    assert "error" in ANSWERS[1]["results"][2]


def test_the_documented_bytes_are_a_request() -> None:
    lines = re.findall(r"```hex\n(.*?)```", PAGE, re.DOTALL)[0].splitlines()
    data = bytes.fromhex("".join(re.split(r"\s{2,}", line)[0] for line in lines))
    request = wire.decode("application/msgpack", data)
    assert request.single
    assert request.properties == ("energy", "forces")
    assert request.structures.numbers.tolist() == [14, 14]
    assert request.structures.positions.tolist() == [[0, 0, 0], [1.5, 1.5, 1.5]]


def test_all_types_are_documented() -> None:
    assert set(re.findall(r"`((?:application|chemical|text)/[a-z.-]+)`", PAGE)) == {*TYPES, "application/json"}


def test_documented_keys_are_those_of_the_decoders() -> None:
    text = section("JSON")
    asked, answered = text.split("### Answer")
    assert keys(asked) == {*json_format.KEYS, *json_structure.KEYS}
    assert keys(answered) == {*json_schema.EvaluateAnswer.model_fields}
    asked, answered = section("MessagePack").split("### Answer")
    assert keys(asked) == set(msgpack_format.KEYS)
    assert keys(answered) >= set(PROPERTIES)
    assert set(npz_format.KEYS) == set(msgpack_format.KEYS) - {"dtype"}


def test_documented_keys_of_answers_are_all_there_are() -> None:
    request = wire.decode("application/msgpack", msgpack_format.pack_request(mixed(), PROPERTIES))
    results = predict(mixed())
    results.errors[1] = StructureError("too_dense", "far too dense")
    answer = msgpack.unpackb(wire.encode(request, results, None, "m")[1])
    documented = keys(section("MessagePack").split("### Answer")[1])
    assert documented == answer.keys() | {"pbc"}


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (json_schema.EvaluateRequest, json_format.KEYS),
        (json_schema.AtomicStructure, json_structure.KEYS),
        (json_schema.Result, (*PROPERTIES, "error", "unavailable", "pbc")),
    ],
)
def test_models_have_the_keys_of_the_decoder(model: type[BaseModel], wanted: tuple[str, ...]) -> None:
    assert set(model.model_fields) == set(wanted)


@pytest.mark.parametrize(
    "structure",
    [
        SILICON, WATER, {**SILICON, "pbc": False}, {**SILICON, "cell": [3, 3, 3]}, {**SILICON, "temperature": 3},
        {**SILICON, "numbers": [0, 1]}, {**SILICON, "numbers": ["14", 14]}, {**SILICON, "cell": [1, 2]},
        {**SILICON, "pbc": [True]}, {**SILICON, "positions": [[0, 0]]}, {**SILICON, "coords": 1},
        {**SILICON, "temperature": "3"}, {"numbers": [1]}, {**SILICON, "positions": [[True, 0, 0], [0, 0, 0]]},
    ],
)  # fmt: skip
def test_models_and_decoder_agree(structure: dict[str, Any]) -> None:
    try:
        json_schema.AtomicStructure.model_validate(structure, strict=True)
        allowed = True
    except ValidationError:
        allowed = False
    assert allowed == (not decode({"structure": structure}).errors)


def test_answers_are_those_of_the_models() -> None:
    request = decode({"structures": [SILICON, WATER, 3], "properties": list(PROPERTIES)})
    data = wire.encode(request, predict(request.structures), None, "m")[1]
    answer = json_schema.EvaluateAnswers.model_validate_json(data, strict=True)
    assert answer.results[2].error is not None
    assert answer.results[1].unavailable == ["stress"]


def test_the_operation_refers_to_schemas_that_are_there() -> None:
    operation, schemas = json_schema.operation()
    text = json.dumps([operation, schemas])
    references = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert references
    assert references <= set(schemas)
    assert json_schema.EvaluateRequest.model_json_schema()["properties"].keys() == set(json_format.KEYS)
