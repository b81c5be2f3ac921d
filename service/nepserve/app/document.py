"""The OpenAPI document: FastAPI's, and the evaluation route, whose bodies FastAPI never sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi.openapi.utils import get_openapi

if TYPE_CHECKING:
    from fastapi import FastAPI


def document(api: FastAPI) -> dict[str, Any]:
    """The document; it is made once."""
    if api.openapi_schema is None:
        api.openapi_schema = get_openapi(
            title=api.title, version=api.version, description=api.description, routes=api.routes
        )
    return api.openapi_schema
