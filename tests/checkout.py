"""The project's own files, as tests of the project look at them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

_FOLDERS = ("model", "service", "tests", "bench", "docs", "examples", "docker", "deploy", ".ci")
_GENERATED = {"__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"}


def read(name: str) -> str:
    """The text of a file of the project."""
    return (ROOT / name).read_text(encoding="utf-8")


def files() -> list[Path]:
    """All files of the project; what was built or installed is not among them."""
    found = [p for p in ROOT.iterdir() if p.is_file()]
    for folder in _FOLDERS:
        found += [p for p in (ROOT / folder).rglob("*") if p.is_file()]
    return sorted(p for p in found if not _GENERATED & set(p.parts))


def blocks(page: Path, language: str) -> list[str]:
    """The contents of the fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
