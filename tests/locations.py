"""Where the reference data live; they stand beside the checkout on development machines and are not part of it."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"
MODELS = SHARED / "fixtures" / "models"
REFERENCES = SHARED / "fixtures" / "ref"
CASES = SHARED / "cases"

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"reference data not found at {SHARED}")
