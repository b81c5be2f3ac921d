"""Changing what is served: loading, replacing and removing models, aliases, and the end of the server."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

from anyio import to_thread
from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import JSONResponse, Response

from nepcore.errors import ModelFileError
from nepserve import models
from nepserve.models import Source
from nepserve.wire.request import WireError, shorten

from . import schemas
from .routes import Here, describe

if TYPE_CHECKING:
    from pathlib import Path

    from nepserve.settings import Settings

Dtype = Literal["float32", "float64"]


async def allow(request: Request, service: Here) -> None:
    """Let only those in who may change things.

    Without keys that is everybody who can connect, which is this machine alone; but not a page that somebody on this
    machine has open in a browser, be it one whose name was pointed to this machine after it was loaded.
    """
    call = request.scope["nepserve.call"]
    if len(service.keys):
        if call.key is None or not call.key.admin:
            name = "" if call.key is None else f" {call.key.name!r}"
            raise WireError(None, "forbidden", f"the key{name} does not open the admin routes")
        return
    origin, host = call.headers.get(b"origin"), call.headers.get(b"host", b"")
    if origin is not None and urlsplit(origin).netloc != host:
        raise WireError(None, "forbidden", "pages of other sites may not change this server")
    if not _is_own(host.decode("latin-1"), service.settings):
        raise WireError(
            None, "forbidden",
            f"a server without keys takes changes under its own address alone, and {shorten(host.decode('latin-1'))} "
            "is not; ask 127.0.0.1, or start it with --api-key-file",
        )  # fmt: skip


def _is_own(host: str, settings: Settings) -> bool:
    """Whether a ``Host`` header calls this server by a name that nobody else can have pointed here."""
    if settings.uds is not None:
        return True
    try:
        name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return False
    if name in {"localhost", settings.host.lower()}:
        return True
    anywhere = settings.host in {"0.0.0.0", "::"}
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return anywhere and name == socket.gethostname().lower()
    # A number is not looked up, so it cannot be pointed elsewhere.
    return address.is_loopback or anywhere


router = APIRouter(tags=["admin"], dependencies=[Depends(allow)])

_PROBLEM: dict[str, Any] = {"model": schemas.Problem}
_ERRORS: dict[int | str, dict[str, Any]] = {403: _PROBLEM, 404: _PROBLEM, 422: _PROBLEM, 503: _PROBLEM}

_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": {"$ref": "#/components/schemas/Load"}},
            "text/plain": {
                "schema": {"type": "string", "description": "A nep.txt; `name` stands in the query string then."}
            },
        },
    }
}


@router.post(
    "/v1/models", status_code=201, summary="Load or replace a model", response_model=schemas.Model,
    responses={**_ERRORS, 413: _PROBLEM, 415: _PROBLEM}, openapi_extra=_BODY,
)  # fmt: skip
async def load(
    request: Request,
    service: Here,
    name: Annotated[str | None, Query(description="Name of an uploaded model.")] = None,
    dtype: Annotated[Dtype | None, Query(description="Arithmetic of an uploaded model.")] = None,
) -> Response:
    """Load a file of the model directory, or an uploaded one (which is kept in memory only).

    A name that is served goes on serving its old model until the new one is warm. A bad file changes nothing.
    """
    body = bytes(await service.bodies.read(request.receive, request.scope["nepserve.call"].headers))
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        wanted = _parse(body)
        source = await to_thread.run_sync(_from_directory, service.settings.model_dir, wanted.name, wanted.path)
        dtype = wanted.dtype or dtype
    elif kind in {"text/plain", "application/octet-stream"}:
        if name is None:
            raise WireError(
                None, "missing_field", "an uploaded model needs a name, as in /v1/models?name=NAME", field="name"
            )
        models.check_name(name)
        source = await to_thread.run_sync(Source.from_bytes, name, "upload", body)
    else:
        raise WireError(
            None, "unsupported_media_type", "wanted application/json with name and path, or text/plain with a nep.txt",
            types=["application/json", "text/plain"],
        )  # fmt: skip
    if source.name in service.registry.aliases:
        source.copy.close()
        raise models.ModelNameError(f"{source.name!r} is an alias of {service.registry.aliases[source.name]!r}")
    try:
        version = await service.engine.serve(source, dtype or service.settings.dtype_of(source.name))
    except BaseException:
        source.copy.close()
        raise
    return JSONResponse(describe(service, version), 201)


def _parse(body: bytes) -> schemas.Load:
    from fastapi.exceptions import RequestValidationError
    from pydantic import ValidationError

    try:
        return schemas.Load.model_validate_json(body)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False)) from None


def _from_directory(folder: Path | None, name: str, path: str) -> Source:
    """Read a model from the model directory, and from nowhere else."""
    models.check_name(name)
    if folder is None:
        raise WireError(
            None, "forbidden", "this server was started without --model-dir: models can be uploaded, not loaded by path"
        )
    if "\0" in path:
        raise WireError(None, "bad_value", "path: it holds a zero byte", field="path")
    base = folder.resolve()
    wanted = (base / path).resolve()
    if not wanted.is_relative_to(base):
        raise WireError(None, "forbidden", f"path: {path!r} is outside the model directory", field="path")
    try:
        return models.read_model(name, wanted)
    except ModelFileError as error:
        # Where the directory is on this machine is nobody's business.
        raise ModelFileError(path, error.line, error.reason) from None


@router.delete("/v1/models/{name}", summary="Remove a model", status_code=204, responses=_ERRORS)
async def unload(name: str, service: Here) -> Response:
    """Take a model away. Requests that hold it are answered; its aliases go with it."""
    await service.engine.unserve(name)
    return Response(status_code=204)


@router.put(
    "/v1/aliases/{alias}", summary="Point an alias to a model", response_model=schemas.Aliases, responses=_ERRORS
)
async def set_alias(alias: str, body: schemas.Alias, service: Here) -> Response:
    """Let requests call a model by a second name; one that is there moves at once."""
    service.registry.alias(alias, body.model)
    return JSONResponse({"aliases": service.registry.aliases})


@router.delete("/v1/aliases/{alias}", summary="Remove an alias", status_code=204, responses=_ERRORS)
async def remove_alias(alias: str, service: Here) -> Response:
    """Take an alias away; its model stays."""
    service.registry.unalias(alias)
    return Response(status_code=204)


@router.post("/v1/drain", summary="Take no more work", response_model=schemas.Drained, responses={403: _PROBLEM})
async def drain(
    service: Here,
    timeout: Annotated[
        float | None,
        Query(ge=0, le=3600, description="Seconds to wait; left out, as long as a stop of the server may."),
    ] = None,
) -> Response:
    """Refuse new work with 503, and answer when what is in flight is done or the time is over.

    Meant for a hook that is called before the server is stopped; it cannot be taken back.
    """
    left = await service.drain(service.settings.shutdown_timeout if timeout is None else timeout)
    return JSONResponse({"status": "draining" if left else "drained", "requests": left})
