"""Where the reference data live: beside the checkout, or where ``NEPSERVE_REFERENCE_DATA`` says; not part of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("NEPSERVE_REFERENCE_DATA") or Path(__file__).resolve().parents[2] / "shared")
MODELS = SHARED / "fixtures" / "models"
REFERENCES = SHARED / "fixtures" / "ref"
CASES = SHARED / "cases"

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"reference data not found at {SHARED}")
