"""Servers for the fault tests: the product's own engine with a small synthetic model, or one with faults to order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from servers import write_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four elements; the stand-in gives some of them faults."""
    return write_model(tmp_path_factory.mktemp("faults") / "main.txt", "C", "Si", "Ge", "Sn")
