from __future__ import annotations

import subprocess
import sys

import pytest

import nepserve.client

HEAVY = (
    "torch",
    "fastapi",
    "starlette",
    "uvicorn",
    "pydantic",
    "pydantic_settings",
    "orjson",
    "numba",
    "scipy",
    "rich",
)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("nepserve.client", (*HEAVY, "ase", "httpx", "asyncio", "typer")),
        ("nepserve.client.http", (*HEAVY, "ase", "httpx", "asyncio", "typer")),
        # httpx brings rich where it is installed, ASE brings scipy.
        ("nepserve.client.aio", (*sorted({*HEAVY} - {"rich"}), "ase", "typer")),
        ("nepserve.client.ase", (*sorted({*HEAVY} - {"scipy"}), "httpx", "matplotlib")),
    ],
)
def test_a_client_brings_nothing_of_the_server(module, absent):
    if module.endswith(".ase"):
        pytest.importorskip("ase")
    code = f"import sys, {module}; print(*[name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_call_brings_nothing_of_the_server(server):
    """Nor does using it: formats are imported when they are first needed."""
    code = (
        "import sys\n"
        "from nepserve.client import Client\n"
        f"client = Client({server.url!r})\n"
        "h2 = {'symbols': ['H', 'H'], 'positions': [[0, 0, 0], [0, 0, 1]]}\n"
        "client.evaluate(h2); client.evaluate_many([h2] * 3); client.models()\n"
        f"print(*[name for name in {(*HEAVY, 'ase', 'httpx')!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
    assert len(server.evaluations) == 2


def test_exported_names_exist_and_are_all():
    assert sorted(nepserve.client.__all__) == nepserve.client.__all__
    for name in nepserve.client.__all__:
        assert getattr(nepserve.client, name).__name__ == name
    with pytest.raises(AttributeError, match="Session"):
        _ = nepserve.client.Session
