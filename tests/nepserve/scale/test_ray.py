"""Replicas on a real Ray of this machine: deaths under load, more and fewer of them, and what is left at the end."""

from __future__ import annotations

import contextlib
import secrets
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from bridges import crystal, free_port, write_model
from nepserve.client import Client
from scaling import Load, Scaling, server_at, status
from servers import is_gone
from servers import write_model as write_toy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("ray", reason="Ray is not installed: pip install 'nepserve[ray]'")

SMALL = [crystal(1, seed=seed) for seed in range(7)]


@pytest.fixture
def address_file(tmp_path: Path) -> Path:
    return tmp_path / "addresses.txt"


def outside(process: psutil.Process) -> list[str]:
    """Addresses beyond this machine that a process listens on."""
    found = []
    with contextlib.suppress(psutil.Error):
        for link in process.net_connections("inet"):
            local = link.laddr.ip.removeprefix("::ffff:")
            if link.status == psutil.CONN_LISTEN and not (local.startswith("127.") or local == "::1"):
                found.append(f"{process.name()} {local}:{link.laddr.port}")
    return found


def test_replicas_that_die_under_load_lose_nothing_and_come_back(address_file: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "nep.txt")
    flags = {"models": [str(model)], "device": "cpu", "threads": 1, "backend": "loop", "dtype": "float64"}
    with Scaling(address_file, {"replicas": 2, "cpus": 0.5}, loader="nepcore:load", **flags) as scaling:
        first = scaling.wait_for_addresses(2)
        everything = scaling.descendants()
        assert [place for process in everything for place in outside(process)] == []
        servers = [server_at(url) for url in first]
        assert {server.cmdline()[-1] for server in servers} == {"nepserve.scale.child"}

        with Load(address_file, SMALL) as load:
            load.wait_for_more(50)
            # A server process.
            servers[0].kill()
            second = scaling.wait_for_addresses(2, without=first[:1])
            assert first[1] in second
            [new] = set(second) - set(first)
            load.wait_for_more(50)
            scaling.wait_for(lambda: status(new)["device_seconds"] > 0, 30)
            # The actor that holds a server.
            actor = psutil.Process(servers[1].ppid())
            assert "NepserveReplica" in actor.name()
            actor.kill()
            third = scaling.wait_for_addresses(2, without=first)
            assert new in third
            [newer] = set(third) - set(second)
            load.wait_for_more(50)
            scaling.wait_for(lambda: status(newer)["device_seconds"] > 0, 30)
            # Its server ends by itself, as soon as what it had is done.
            assert is_gone(servers[1].pid, 10)
            load.stop()
        assert load.errors == []
        assert load.answered > 150

        everything = scaling.descendants()
        assert scaling.interrupt() == 0, scaling.log
        assert scaling.addresses == []
    assert [p for p in everything if not is_gone(p.pid, 10)] == []
    assert "was ended by SIGKILL" in scaling.log
    assert "was lost" in scaling.log


def test_ctrl_c_while_ray_starts_leaves_nothing(address_file: Path) -> None:
    with Scaling(address_file, {"replicas": 1, "cpus": 0.5}, device="cpu") as scaling:
        scaling.wait_for(lambda: any(p.name() == "gcs_server" for p in scaling.descendants()))
        started = scaling.descendants()
        assert scaling.interrupt() == 0, scaling.log
    assert [p for p in started if not is_gone(p.pid, 10)] == []
    assert "is ready" not in scaling.log


@pytest.fixture
def ray_head(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Ray cluster of one node that has, as far as it knows, two GPUs."""
    port = free_port()
    # What keeps it to this machine is told to whoever goes there, too.
    for name, value in (
        ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"),
        ("RAY_AUTH_MODE", "token"),
        ("RAY_AUTH_TOKEN", secrets.token_hex(32)),
    ):
        monkeypatch.setenv(name, value)
    command = [
        *(sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--head", "--block"),
        *("--port", str(port), "--num-cpus", "4", "--num-gpus", "2", "--object-store-memory", "80000000"),
        *("--include-dashboard", "false", "--node-ip-address", "127.0.0.1", "--disable-usage-stats"),
    ]
    head = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert head.stdout is not None
    try:
        said = ""
        while "Ray runtime started" not in said:
            line = head.stdout.readline()
            assert line, said
            said += line
        yield f"127.0.0.1:{port}"
        assert head.poll() is None, "the cluster that was there has to stay"
    finally:
        below = psutil.Process(head.pid).children(recursive=True)
        head.terminate()
        try:
            head.wait(30)
        except subprocess.TimeoutExpired:
            head.kill()
            head.wait(10)
        _, left = psutil.wait_procs(below, 10)
        for process in left:
            process.kill()
        head.stdout.close()


def test_a_cluster_that_is_there_is_used_and_left(ray_head: str, address_file: Path, tmp_path: Path) -> None:
    """Each replica has a GPU of its own; more come with the queue and go with it; nothing of them stays."""
    model = write_toy(tmp_path / "nep.txt", "Si", "Ge")
    wanted = {
        "ray_address": ray_head, "least": 1, "most": 2, "queue_atoms": 20, "up_seconds": 1, "down_seconds": 4,
        "gpus": 1,
    }  # fmt: skip
    # The GPUs are not there; the stand-in computes on the CPU whatever it is given.
    options = {"stand_in": {"seconds": 0.05}, "models": [str(model)], "probe_interval": 5}
    with Scaling(address_file, wanted, device="cpu", **options) as scaling:
        one = scaling.wait_for_addresses(1)
        with Load(address_file, SMALL, clients=12) as load:
            # Eleven structures of 8 atoms wait while one is computed.
            both = scaling.wait_for_addresses(2, seconds=60)
            given = {server_at(url).environ()["CUDA_VISIBLE_DEVICES"] for url in both}
            assert given == {"0", "1"}
            scaling.wait_for(lambda: all(status(url)["device_seconds"] > 1 for url in both), 60)
            load.stop()
        assert load.errors == []
        scaling.wait_for_addresses(1, seconds=60)
        [gone] = set(both) - set(scaling.addresses)
        [stays] = scaling.addresses
        scaling.wait_for(lambda: f"replica {1 + (gone != one[0])} ended with code 0" in scaling.log, 60)
        with pytest.raises(AssertionError, match="nobody"):
            server_at(gone)
        assert Client(stays).evaluate(SMALL[0])["energy"]
        assert one[0] in both
        server = server_at(stays)

        # Killed, it cannot say goodbye; the cluster sees that its job is gone, and the server that its actor is.
        scaling.process.send_signal(signal.SIGKILL)
        scaling.process.wait(10)
        assert is_gone(server.pid, 60)

    with Scaling(address_file, {"ray_address": ray_head, "gpus": 2}, devices="cpu:2", **options) as scaling:
        # The GPUs are free again; now one has both.
        [url] = scaling.wait_for_addresses(1, without=[stays])
        server = server_at(url)
        assert server.environ()["CUDA_VISIBLE_DEVICES"] == "0,1"
        assert len(status(url)["engine"]["devices"]) == 2
        assert scaling.interrupt() == 0, scaling.log
        assert is_gone(server.pid)


def test_what_no_server_can_do_ends_it_with_the_reason(address_file: Path, tmp_path: Path) -> None:
    model = write_toy(tmp_path / "nep.txt", "Si")
    flags = {"models": [str(model)], "device": "cpu", "backend": "magic"}
    with Scaling(address_file, {"replicas": 1, "cpus": 0.5}, loader="nepcore:load", **flags) as scaling:
        assert scaling.process.wait(90) == 2, scaling.log
    last = scaling.lines[-1]
    assert "error: " in last
    assert "magic" in last
