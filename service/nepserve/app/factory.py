"""Putting the application together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

import nepcore
from nepserve.wire.request import WireError

from . import admin, docs, problems, routes
from .document import document
from .door import Door
from .evaluate import Evaluate
from .sessions import Stepping

if TYPE_CHECKING:
    from starlette.requests import Request

    from .service import Service

DESCRIPTION = """\
Energies, forces and stress of atomic structures from NEP (neuroevolution potential) models.

Å, eV, eV/Å, eV/Å³. Cell vectors are rows. Stress is σ = (1/V) ∂E/∂ε, tension positive, in Voigt order
xx yy zz yz xz xy. Errors are problem documents (RFC 9457) with a stable `code`.
"""


def create_app(service: Service) -> Door:
    """The ASGI application of a server."""
    api = FastAPI(
        title="nepserve",
        version=nepcore.__version__,
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        # A path with a slash too many is an unknown path, not a redirect that loses the body.
        redirect_slashes=False,
    )
    api.state.service = service
    for part in (routes.router, admin.router, docs.router):
        api.include_router(part)
    api.openapi = lambda: document(api)  # type: ignore[method-assign]
    api.add_exception_handler(HTTPException, _http)
    api.add_exception_handler(RequestValidationError, _invalid)
    api.add_exception_handler(WireError, _known)
    for kind in problems.KNOWN:
        api.add_exception_handler(kind, _known)
    api.add_exception_handler(Exception, _unforeseen)
    return Door(service, Evaluate(service), Stepping(service), api)


def _respond(request: Request, error: WireError) -> Response:
    call = request.scope["nepserve.call"]
    call.note = error.code
    status, headers, body = problems.answer(error, call.id)
    response = Response(body, status)
    response.raw_headers = headers
    return response


async def _known(request: Request, error: Exception) -> Response:
    wire_error = problems.as_wire_error(error)
    assert wire_error is not None
    return _respond(request, wire_error)


async def _unforeseen(request: Request, error: Exception) -> Response:  # noqa: ARG001 (the door logs it)
    """What the client is told; the error itself goes on to the door."""
    return _respond(request, problems.internal())


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    if error.status_code == 404:
        return _respond(request, WireError(None, "not_found", f"there is nothing at {path}; see /docs"))
    if error.status_code == 405:
        allow = (error.headers or {}).get("allow") or (error.headers or {}).get("Allow") or ""
        methods = sorted({word.strip() for word in allow.split(",") if word.strip()})
        detail = f"{request.method} is not for {path}; wanted {' or '.join(methods)}"
        return _respond(request, WireError(None, "method_not_allowed", detail, allow=methods))
    return _respond(request, WireError(error.status_code, "bad_value", str(error.detail)))


async def _invalid(request: Request, error: Exception) -> Response:
    """What pydantic does not like about the body of one of the other routes."""
    assert isinstance(error, RequestValidationError)
    first: Any = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"] if part != "body") or None
    if first["type"] == "json_invalid":
        return _respond(request, WireError(None, "bad_json", f"the body is not JSON: {first['ctx']['error']}"))
    code = {"missing": "missing_field", "extra_forbidden": "unknown_field"}.get(first["type"], "bad_value")
    detail = f"{field or 'the body'}: {first['msg'][:1].lower()}{first['msg'][1:]}"
    return _respond(request, WireError(None, code, detail, field=field))
