"""The interactive API page: Swagger UI from the package's own files, so that it works without internet."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import RedirectResponse, Response

from nepserve.wire.request import WireError

STATIC = Path(__file__).parent / "static"

_FILES = {
    "swagger-ui.css": "text/css; charset=utf-8",
    "swagger-ui-bundle.js": "text/javascript; charset=utf-8",
    "start.js": "text/javascript; charset=utf-8",
}

# Whatever the bundle may want to fetch, a browser asks nobody but this server.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

router = APIRouter(include_in_schema=False)


@router.get("/")
async def root() -> Response:
    """Whoever opens the server in a browser sees the page."""
    return RedirectResponse("docs")


@router.get("/docs")
async def page() -> Response:
    """The page."""
    headers = {"content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
    return Response(_read("docs.html"), media_type="text/html; charset=utf-8", headers=headers)


@router.get("/docs/{name}")
async def asset(name: str) -> Response:
    """A file of the page."""
    if name not in _FILES:
        raise WireError(None, "not_found", f"the page has no file {name!r}")
    headers = {"cache-control": "public, max-age=86400", "x-content-type-options": "nosniff"}
    return Response(_read(name), media_type=_FILES[name], headers=headers)


@lru_cache
def _read(name: str) -> bytes:
    return (STATIC / name).read_bytes()
