"""``python -m nepserve.engine``: the process that owns one device."""

from __future__ import annotations

from .process import run

if __name__ == "__main__":
    run()
