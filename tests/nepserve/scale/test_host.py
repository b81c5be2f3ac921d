"""One replica on its node, without a cluster: the server process, what it says of itself, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest

from nepserve.scale.host import Ended, Host, Look, _variables
from servers import STAND_IN, is_gone, write_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

KEY = "a-key-of-sixteen-letters"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    """Start one; it is ended afterwards."""
    model = write_model(tmp_path / "nep.txt", "Si")
    made: list[Host] = []

    def place(address: str | None = None, **settings) -> Host:
        values = {"models": [f"nep={model}"], "device": "cpu", "port": 0, "threads": 1, **settings}
        made.append(Host(len(made) + 1, values, STAND_IN, address))
        return made[-1]

    yield place
    for host in made:
        host.drain()
        assert host.live().code is not None


def look_until(host: Host, what: Callable[[Look], bool], seconds: float = 30.0) -> Look:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        look = host.look()
        if look is not None and what(look):
            return look
        time.sleep(0.05)
    raise AssertionError("it did not come to that")


def test_it_says_where_it_is_and_how(place) -> None:
    host = place()
    assert host.look() is None, "not before it listens"
    look = look_until(host, lambda look: look.ready)
    assert look.url.startswith("http://127.0.0.1:")
    assert (look.atoms, look.devices, look.reason) == (0, 1, "")
    before = look.device_seconds
    body = {"structure": {"symbols": ["Si", "Si"], "positions": [[0, 0, 0], [0, 0, 2.4]]}}
    assert httpx.post(f"{look.url}/v1/evaluate", json=body, timeout=30).status_code == 200
    assert look_until(host, lambda look: look.device_seconds > before).uptime > look.uptime


def test_a_drain_ends_it_with_0(place) -> None:
    host = place()
    look_until(host, lambda look: look.ready)
    ended: list[Ended] = []
    waiting = threading.Thread(target=lambda: ended.append(host.live()))
    waiting.start()
    host.drain()
    waiting.join(20)
    assert ended[0].code == 0
    assert host.look() is None


def test_with_keys_it_has_one_of_its_own(place) -> None:
    host = place(api_keys=[f"alice:{KEY}"])
    look = look_until(host, lambda look: look.ready)
    assert httpx.get(f"{look.url}/v1/status").status_code == 401
    assert httpx.get(f"{look.url}/v1/status", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200


@pytest.mark.parametrize(("address", "shown"), [("10.1.2.3", "10.1.2.3"), ("fd00::7", "[fd00::7]"), (None, None)])
def test_on_all_addresses_the_node_is_named(place, address, shown) -> None:
    host = place(address, host="0.0.0.0", api_keys=[f"alice:{KEY}"])
    look = look_until(host, lambda look: look.ready)
    assert look.url.rpartition(":")[0] == f"http://{shown or os.uname().nodename}"


def test_a_setting_that_is_wrong_is_its_last_word(place) -> None:
    ended = place(ssl_certfile="/nowhere/c.pem", ssl_keyfile="/nowhere/k.pem").live()
    assert ended.code == 2
    assert "/nowhere/c.pem" in ended.words[-1]
    assert str(ended).startswith("ended with code 2: nepserve: ")


@pytest.mark.parametrize(
    ("ended", "text"),
    [
        (Ended(-signal.SIGKILL), "was ended by SIGKILL"),
        (Ended(None, ["the node died"]), "was lost: the node died"),
        (Ended(0), "ended with code 0"),
    ],
    ids=str,
)
def test_an_end_in_words(ended, text) -> None:
    assert str(ended) == text


def test_the_server_ends_when_who_started_it_is_killed(tmp_path) -> None:
    """It finishes what it has, as after SIGTERM."""
    model = write_model(tmp_path / "nep.txt", "Si")
    program = (
        "import time\n"
        "from nepserve.scale.host import Host\n"
        f"host = Host(1, {{'models': ['{model}'], 'device': 'cpu', 'port': 0, 'threads': 1}}, {STAND_IN!r})\n"
        "while not ((look := host.look()) and look.ready): time.sleep(0.05)\n"
        "print(host._process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert holder.stdout is not None
        server = psutil.Process(int(holder.stdout.readline()))
        everything = [server, *server.children(recursive=True)]
        assert len(everything) == 2
    finally:
        holder.kill()
        holder.wait(10)
        holder.stdout.close()
    assert [p for p in everything if not is_gone(p.pid, 10)] == []


def test_the_server_gets_the_gpus_of_the_node_and_none_of_its_settings() -> None:
    given = {
        "CUDA_VISIBLE_DEVICES": "3", "HIP_VISIBLE_DEVICES": "3", "PATH": "/bin", "NEPSERVE_PORT": "9",
        "NEPSERVE_CACHE_DIR": "/c", "RAY_AUTH_TOKEN": "secret",
    }  # fmt: skip
    assert _variables(given) == {
        "CUDA_VISIBLE_DEVICES": "3", "HIP_VISIBLE_DEVICES": "3", "PATH": "/bin", "NEPSERVE_CACHE_DIR": "/c",
    }  # fmt: skip
