"""The inference service for NEP models: server, clients, command line. Imports neither torch nor FastAPI."""

from __future__ import annotations

from nepcore import __version__

__all__ = ["__version__"]
