"""The OpenAPI document: FastAPI's, the evaluation route, whose bodies FastAPI never sees, and problem documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi.openapi.utils import get_openapi

from nepserve.wire import frame, json_schema
from nepserve.wire.problem import CODES, CONTENT_TYPE

from . import schemas

if TYPE_CHECKING:
    from fastapi import FastAPI

_TITLES = {
    400: "Malformed.",
    401: "A key is needed.",
    403: "The key does not allow this.",
    404: "No such model or address.",
    406: "None of the accepted formats is spoken here.",
    408: "The body did not arrive in time.",
    413: "Larger than this server takes.",
    415: "The content type is not spoken here.",
    422: "The input cannot be used.",
    429: "The queue is full; see Retry-After.",
    500: "The server made a mistake.",
    503: "Starting, draining, or the device does not answer; see Retry-After.",
    504: "The time given for the request is over.",
}
_EVALUATE = (400, 401, 404, 406, 408, 413, 415, 422, 429, 500, 503, 504)

_REFERENCE = {"$ref": "#/components/schemas/Problem"}


def document(api: FastAPI) -> dict[str, Any]:
    """The document; it is made once."""
    if api.openapi_schema is None:
        made = get_openapi(title=api.title, version=api.version, description=api.description, routes=api.routes)
        _add_evaluate(made)
        _add_sessions(made)
        _speak_of_problems(made)
        made["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer", "description": "Where the server has keys."}
        }
        # A key, or none: whether this server asks for one is not known before it runs.
        made["security"] = [{}, {"key": []}]
        api.openapi_schema = made
    return api.openapi_schema


def _add_evaluate(made: dict[str, Any]) -> None:
    described, models = json_schema.operation()
    answer = described["responses"]["200"]
    answer["headers"] = {
        "X-Request-Id": {"schema": {"type": "string"}, "description": "As it was sent, or made up."},
        "Server-Timing": {"schema": {"type": "string"}, "description": "ms: queue, pack, device, unpack."},
        "X-Batch-Atoms": {"schema": {"type": "integer"}, "description": "Atoms of the batch it was computed in."},
    }
    operation = {
        "tags": ["evaluate"],
        "summary": "Energies, forces, stress ...",
        "description": (
            "One structure or many, as JSON, MessagePack, extended XYZ or npz. A structure that fails by itself fails "
            "the request if it came alone as `structure`; in a batch it is an entry of the answer."
        ),
        "operationId": "evaluate",
        "parameters": [
            _parameter("model", "query", {"type": "string"}, "Name of the model, for formats without a place for it."),
            _parameter("properties", "query", {"type": "string"}, "What to compute, with commas between."),
            _parameter("X-Request-Id", "header", {"type": "string"}, "Echoed, and written to the log."),
            _parameter("X-Request-Timeout", "header", {"type": "number"}, "Seconds the answer is waited for."),
            _parameter(
                "X-Priority", "header", {"type": "string", "enum": ["interactive", "bulk"]},
                "Interactive requests go before bulk ones.",
            ),
        ],
        **described,
    }  # fmt: skip
    operation["responses"] = {"200": answer, **{str(status): {} for status in _EVALUATE}}
    made["paths"] = {"/v1/evaluate": {"post": operation}, **made["paths"]}
    components = made.setdefault("components", {}).setdefault("schemas", {})
    components.update(models)
    problem_schema = schemas.Problem.model_json_schema()
    problem_schema["properties"]["code"]["enum"] = list(CODES)
    components["Problem"] = problem_schema
    components["Load"] = schemas.Load.model_json_schema()


def _add_sessions(made: dict[str, Any]) -> None:
    binary = {"schema": {"type": "string", "format": "binary"}}
    id_ = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    codes: dict[str, Any] = {str(status): {} for status in _EVALUATE if status != 406}
    opening = {
        "type": "object",
        "properties": {
            "model": {"type": "string"},
            "properties": {"type": "array", "items": {"type": "string"}},
            "numbers": {"type": "array", "items": {"type": "integer"}},
            "symbols": {"type": "array", "items": {"type": "string"}},
            "cell": {"type": "array"},
            "pbc": {},
            "temperature": {"type": "number"},
        },
        "additionalProperties": False,
    }
    step = {
        "type": "object",
        "required": ["positions"],
        "properties": {
            "positions": {"type": "array"},
            "cell": {"type": "array"},
            "properties": {"type": "array", "items": {"type": "string"}},
        },
        "additionalProperties": False,
    }

    def operation(summary: str, text: str, name: str, body: dict[str, Any] | None, *parameters: Any) -> dict[str, Any]:
        described: dict[str, Any] = {
            "tags": ["sessions"], "summary": summary, "description": text, "operationId": name,
            "parameters": list(parameters),
            "responses": {"200": {"description": "Done.", "content": {"application/json": {"schema": {}}}}, **codes},
        }  # fmt: skip
        if body is not None:
            described["requestBody"] = {"required": True, "content": body}
        return described

    forms = {"application/json": {"schema": opening}, "application/msgpack": binary}
    steps = {"application/json": {"schema": step}, "application/msgpack": binary, frame.CONTENT_TYPE: binary}
    put = operation(
        "A step of a session", "Positions, and a cell if it changed. An id that is not known is `session_lost`: open "
        "it again.", "step", steps, id_,
    )  # fmt: skip
    put["responses"]["200"]["content"] = {"application/json": {"schema": {}}, frame.CONTENT_TYPE: binary}
    delete = operation("End a session", "It would go by itself in time.", "close_session", None, id_)
    delete["responses"] = {"204": {"description": "It is gone."}, "401": {}, "404": {}, "500": {}}
    made["paths"].update({
        "/v1/sessions": {
            "post": operation("Open a session", "Species, model and properties, once.", "open_session", forms)
        },
        "/v1/sessions/{id}": {"delete": delete},
        "/v1/sessions/{id}/positions": {"put": put},
    })  # fmt: skip


def _parameter(name: str, place: str, schema: dict[str, Any], text: str) -> dict[str, Any]:
    return {"name": name, "in": place, "required": False, "schema": schema, "description": text}


def _speak_of_problems(made: dict[str, Any]) -> None:
    """Let every error of every operation be a problem document."""
    for path in made["paths"].values():
        for operation in path.values():
            responses = operation["responses"]
            responses.setdefault("401", {})
            responses.setdefault("500", {})
            for status, response in responses.items():
                if status[0] in "45":
                    response["description"] = _TITLES[int(status)]
                    response["content"] = {CONTENT_TYPE: {"schema": _REFERENCE}}
                    if status in {"429", "503"}:
                        response["headers"] = {
                            "Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}
                        }
    for unused in ("HTTPValidationError", "ValidationError"):
        made["components"]["schemas"].pop(unused, None)
