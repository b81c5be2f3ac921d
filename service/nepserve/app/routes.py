"""What there is to know of a server: models, version, status, health, metrics."""

from __future__ import annotations

import platform
import time
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse, Response

import nepcore
from nepcore import bundled
from nepserve.models import public_name
from nepserve.wire.request import WireError

from . import metrics, problems, schemas
from .service import Service

if TYPE_CHECKING:
    from nepserve.models import Version

router = APIRouter()


def service_of(request: Request) -> Service:
    """The parts of the server that a request came to."""
    service: Service = request.app.state.service
    return service


Here = Annotated[Service, Depends(service_of)]


def describe(service: Service, version: Version) -> dict[str, Any]:
    """A served model, as :class:`schemas.Model` documents it."""
    file = version.source.file
    described = {
        "name": version.name,
        "aliases": [alias for alias, model in service.registry.aliases.items() if model == version.name],
        "origin": version.source.origin,
        "sha256": version.source.sha256,
        "dtype": version.dtype,
        "elements": list(file.elements),
        "temperature": file.temperature,
        "cutoff": file.cutoff,
        "max_atoms": service.dispatcher.max_atoms,
        "loaded_at": version.loaded_at,
        "file": file.describe(),
    }
    if version.source.origin == "bundled":
        described["about"] = bundled.about()
    described.update({key: value for key, value in version.info.items() if key not in described})
    return described


@router.get("/v1/models", tags=["models"], summary="The served models", response_model=schemas.Models)
async def models(service: Here) -> Response:
    """All models with what their files say."""
    content = {
        "models": [describe(service, version) for version in service.registry.versions],
        "aliases": service.registry.aliases,
    }
    if service.registry.default is not None:
        content["default"] = service.registry.default
    return JSONResponse(content)


@router.get(
    "/v1/models/{name}", tags=["models"], summary="One model", response_model=schemas.Model,
    responses={404: {"model": schemas.Problem}},
)  # fmt: skip
async def model(name: str, service: Here) -> Response:
    """A model by its name or an alias."""
    return JSONResponse(describe(service, service.registry.get(name)))


@router.get("/v1/version", tags=["server"], summary="What runs here", response_model=schemas.Version)
async def version(service: Here) -> Response:
    """Versions of the program and of what it stands on."""
    content = {
        "name": "nepserve",
        "version": nepcore.__version__,
        "api": "v1",
        "python": platform.python_version(),
    }
    torch = service.engine.status().get("torch")
    if torch is not None:
        content["torch"] = torch
    return JSONResponse(content)


@router.get("/v1/status", tags=["server"], summary="State of the server", response_model=schemas.Status)
async def status(service: Here) -> Response:
    """Queue, limits, engine."""
    reason = service.unready
    waiting = service.dispatcher.waiting
    content: dict[str, Any] = {
        "ready": reason is None,
        "draining": service.draining,
        "uptime": round(time.time() - service.started, 3),
        "queue": {
            "requests": waiting.requests,
            "atoms": waiting.atoms,
            "max_requests": service.settings.max_queue_requests,
            "max_atoms": service.settings.max_queue_atoms,
        },
        "limits": {
            "max_body": service.limits.max_body,
            "max_structures": service.limits.max_structures,
            "max_atoms": service.limits.max_atoms,
            "max_atoms_per_structure": service.dispatcher.max_atoms,
        },
        "device_seconds": round(service.dispatcher.device_seconds, 6),
        "engine": service.engine.status(),
        "models": service.registry.names,
        "backends": {v.name: v.info["choice"] for v in service.registry.versions if "choice" in v.info},
        "work_per_second": {public_name(key): round(speed) for key, speed in service.dispatcher.speeds.items()},
    }
    if service.fronts is not None:
        content["fronts"] = service.fronts.status()
    if reason is not None:
        content["reason"] = reason
    return JSONResponse(content)


_NOT_READY: dict[int | str, dict[str, Any]] = {
    503: {
        "model": schemas.Problem,
        "description": "Starting, draining, or the device does not answer; `detail` says which.",
    }
}


@router.get("/healthz", tags=["health"], summary="Is the process alive?", response_model=schemas.Live)
@router.get("/v1/health/live", tags=["health"], summary="As /healthz", response_model=schemas.Live)
@router.get("/v2/health/live", tags=["health"], summary="As /healthz", response_model=schemas.Live)
async def live(service: Here) -> Response:
    """Answers while the process runs, also while it drains; never asks the device."""
    return JSONResponse({"status": "alive", "uptime": round(time.time() - service.started, 3)})


@router.get("/readyz", tags=["health"], summary="Can it compute?", response_model=schemas.Ready, responses=_NOT_READY)
@router.get(
    "/v1/health/ready", tags=["health"], summary="As /readyz", response_model=schemas.Ready, responses=_NOT_READY
)
@router.get(
    "/v2/health/ready", tags=["health"], summary="As /readyz", response_model=schemas.Ready, responses=_NOT_READY
)
async def ready(service: Here) -> Response:
    """Only if every model is warm, the engine is alive, and it gave a known answer lately."""
    reason = service.unready
    if reason is not None:
        code = "draining" if service.draining else "starting" if service.engine.starting else "engine_down"
        raise WireError(
            None, code, reason, retry_after=problems.RETRY_SECONDS, progress=service.engine.status().get("progress")
        )
    return JSONResponse({"status": "ready", "models": service.registry.names})


@router.get("/metrics", tags=["server"], summary="Prometheus metrics", response_class=Response)
async def prometheus(service: Here) -> Response:
    """All series of this server."""
    return Response(service.metrics.text(), media_type=metrics.CONTENT_TYPE)
