"""``python -m nepserve.fronts``: one front of a server that has several."""

from __future__ import annotations

from .process import run

if __name__ == "__main__":
    run()
