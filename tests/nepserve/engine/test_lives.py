"""Engines that die, hang, are killed, or outlive nobody."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

from engines import TOY, USUAL, assert_same_bits, block, cloud, directly, engine, file, run, structure
from nepcore.structures import Structures
from nepserve.engine import EngineDown, EngineLink
from nepserve.engine.process import EXIT_DEVICE_LOST, EXIT_PROTOCOL
from nepserve.parent import EXIT_ORPHANED

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from pathlib import Path

ORDER = ("energy", "forces", "stress")
loops = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])


def fatal(symbol: str = "Ge") -> Structures:
    return Structures.pack([structure(3), structure(2, 1, [symbol])])


def slow(tiles: int) -> tuple[str, Structures]:
    """A model, and a block over which it takes ``tiles`` times 0.05 s."""
    return file(tile=4, faults={"Ge": "slow"}), Structures.pack([structure(4, i, ["Ge"]) for i in range(tiles)])


async def assert_down(*calls: Awaitable[Any], match: str) -> None:
    """Every call fails because the engine is down, and may be repeated."""
    for error in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(error, EngineDown), error
        assert error.retryable
        assert match in error.reason


def gone(pid: int) -> bool:
    """Whether no process of that number runs (one that nobody has reaped yet does not run)."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 20
    while not gone(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.02)


@loops
@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        pytest.param("exit", 13, "ended with code 13", id="exit"),
        pytest.param("kill", -9, "ended by SIGKILL", id="sigkill"),
        pytest.param("abort", -6, "ended by SIGABRT", id="sigabrt"),
        pytest.param("lost", EXIT_DEVICE_LOST, "the device is lost: RuntimeError: CUDA error: device-side", id="lost"),
    ],
)
def test_an_engine_dies_with_work_in_flight(loop: str, fault: str, code: int, text: str) -> None:
    async def main() -> None:
        async with engine(file(faults={"Ge": fault})) as link:
            pid = link.pid
            assert pid is not None
            await assert_down(
                link.evaluate("toy", [fatal()], USUAL),
                link.evaluate("toy", [block(4)], USUAL),
                link.evaluate("toy", [cloud(100_000)], frozenset({"energy"})),
                link.load("more", file(), dtype="float64", backend="auto"),
                link.unload("toy"),
                match=text,
            )
            await link.exited.wait()
            assert link.state == "down"
            assert link.exit is not None
            assert link.exit.code == code
            assert text in str(link.exit)
            if fault == "exit":
                assert "last words of the toy" in link.exit.stderr
            if fault == "abort":
                # The interpreter's own stack of what it was doing.
                assert any("_fail" in line for line in link.exit.stderr)
            assert not psutil.pid_exists(pid)
            await assert_down(link.evaluate("toy", [block(1)], USUAL), link.ping(), match="the engine is down")
            assert await link.stop(1.0) == code

    run(main, loop)


def test_answers_given_before_the_end_arrive() -> None:
    async def main() -> None:
        async with engine(file(faults={"Ge": "exit"})) as link:
            good = [asyncio.create_task(link.evaluate("toy", [block(3 + i)], USUAL)) for i in range(5)]
            bad = asyncio.create_task(link.evaluate("toy", [fatal()], USUAL))
            for i, task in enumerate(good):
                assert_same_bits((await task).predictions, directly(block(3 + i), ORDER))
            await assert_down(bad, match="code 13")

    run(main)


@loops
def test_an_engine_is_killed_from_outside(loop: str) -> None:
    model, structures = slow(400)

    async def main() -> None:
        async with engine(model) as link:
            assert link.pid is not None
            busy = asyncio.create_task(link.evaluate("toy", [structures], USUAL))
            await asyncio.sleep(0.1)
            os.kill(link.pid, signal.SIGKILL)
            await assert_down(busy, match="ended by SIGKILL")
        assert psutil.Process().children() == []

    run(main, loop)


@loops
@pytest.mark.parametrize("notice", ["pidfd", "stderr"])
@pytest.mark.parametrize("shared", [True, False], ids=["sent", "half-sent"])
def test_an_engine_dies_with_messages_unread(
    loop: str, notice: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_: int) -> int:
        raise OSError(38, "Function not implemented")

    if notice == "stderr":
        monkeypatch.setattr(os, "pidfd_open", none, raising=False)

    async def main() -> None:
        async with engine(file(), arenas=shared) as link:
            assert link.pid is not None
            os.kill(link.pid, signal.SIGSTOP)
            calls = [asyncio.create_task(link.evaluate("toy", [cloud(n)], USUAL)) for n in (10, 1000, 900_000)]
            await asyncio.sleep(0.1)
            os.kill(link.pid, signal.SIGKILL)
            await assert_down(*calls, match="ended by SIGKILL")
        # The loop can use the numbers of the descriptors again.
        async with engine(file()) as link:
            await link.evaluate("toy", [block(3)], USUAL)

    run(main, loop)


@loops
def test_an_engine_ends_by_itself_with_messages_unread(loop: str) -> None:
    async def main() -> None:
        for _ in range(4):
            async with engine(file(faults={"Ge": "lost"})) as link:
                # Those with a descriptor end what is read at once: the others are left.
                calls = [link.evaluate("toy", [b], USUAL) for b in (fatal(), cloud(20_000), block(1), block(2))]
                await assert_down(*calls, match="the device is lost")

    run(main, loop)


def test_an_idle_engine_that_dies_is_noticed() -> None:
    async def main() -> None:
        async with engine() as link:
            assert link.pid is not None
            os.kill(link.pid, signal.SIGKILL)
            await asyncio.wait_for(link.exited.wait(), 10)
            assert link.exit is not None
            assert link.exit.signal == "SIGKILL"

    run(main)


@loops
def test_an_engine_that_hangs_is_ended(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with engine(file(faults={"Ge": "hang"}), hang_seconds=0.5) as link:
            pid = link.pid
            assert pid is not None
            hanging = asyncio.create_task(link.evaluate("toy", [fatal()], USUAL))
            await asyncio.sleep(0.05)
            waiting = [link.evaluate("toy", [block(2)], USUAL), link.ping()]
            await assert_down(hanging, *waiting, match="no sign of life for 0.5 s")
            await link.exited.wait()
            assert link.exit is not None
            assert link.exit.signal == "SIGKILL"
            # Where it hung stands in the log.
            assert any("in _fail" in line for line in link.exit.stderr)
            assert not psutil.pid_exists(pid)

    run(main, loop)
    assert "in _fail" in caplog.text


def test_a_stopped_engine_counts_as_hung() -> None:
    async def main() -> None:
        async with engine(file(), hang_seconds=0.4) as link:
            assert link.pid is not None
            os.kill(link.pid, signal.SIGSTOP)
            await assert_down(link.ping(), match="no sign of life")

    run(main)


def test_slow_is_not_hung() -> None:
    model, structures = slow(40)

    async def main() -> None:
        # Each tile takes less than the bound, all of them much more.
        async with engine(model, hang_seconds=0.6) as link:
            found = await link.evaluate("toy", [structures], USUAL)
            assert_same_bits(found.predictions, directly(structures, ORDER))

    run(main)


def test_a_slow_load_is_not_hung() -> None:
    async def main() -> None:
        async with engine(file(), hang_seconds=0.4) as link:
            loading = link.load("slow", file(load_seconds=1.2), dtype="float64", backend="auto")
            waiting = link.evaluate("toy", [block(3)], USUAL)
            await asyncio.gather(loading, waiting)

    run(main)


def test_a_front_that_was_stopped_does_not_blame_the_engine() -> None:
    model, structures = slow(12)

    async def main() -> None:
        async with engine(model, hang_seconds=0.5) as link:
            answer = asyncio.create_task(link.evaluate("toy", [structures], USUAL))
            await asyncio.sleep(0.05)
            time.sleep(1.5)
            assert_same_bits((await answer).predictions, directly(structures, ORDER))

    run(main)


def test_a_load_that_dies_or_hangs() -> None:
    async def main() -> None:
        async with engine() as link:
            await assert_down(
                link.load("m", file(load_error="exit"), dtype="float64", backend="auto"), match="ended with code 14"
            )
        async with engine(hang_seconds=0.2, load_seconds=0.6) as link:
            await assert_down(
                link.load("m", file(load_seconds=60), dtype="float64", backend="auto"), match="no sign of life"
            )

    run(main)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_to_the_group_are_for_the_front(number: signal.Signals) -> None:
    model, structures = slow(4)

    async def main() -> None:
        async with engine(model) as link:
            assert link.pid is not None
            answer = asyncio.create_task(link.evaluate("toy", [structures], USUAL))
            await asyncio.sleep(0.05)
            os.kill(link.pid, number)
            assert_same_bits((await answer).predictions, directly(structures, ORDER))

    run(main)


def test_an_engine_has_a_session_of_its_own() -> None:
    async def main() -> None:
        async with engine() as link:
            assert link.pid is not None
            assert os.getsid(link.pid) == link.pid

    run(main)


def test_stop_lets_work_in_flight_finish() -> None:
    model, structures = slow(4)

    async def main() -> None:
        async with engine(model) as link:
            answers = [asyncio.create_task(link.evaluate("toy", [structures], USUAL)) for _ in range(2)]
            await asyncio.sleep(0.01)
            codes = await asyncio.gather(link.stop(20.0), link.stop(20.0))
            assert codes == [0, 0]
            for answer in answers:
                assert_same_bits((await answer).predictions, directly(structures, ORDER))
            await assert_down(link.ping(), match="the engine is")

    run(main)


def test_stop_has_a_bound() -> None:
    async def main() -> None:
        async with engine(file(faults={"Ge": "hang"})) as link:
            answer = asyncio.create_task(link.evaluate("toy", [fatal()], USUAL))
            await asyncio.sleep(0.05)
            assert await link.stop(0.3) == -signal.SIGKILL
            await assert_down(answer, match="did not end within 0.3 s")

    run(main)


def test_kill_ends_it_at_once() -> None:
    async def main() -> None:
        async with engine(file(faults={"Ge": "hang"})) as link:
            answer = asyncio.create_task(link.evaluate("toy", [fatal()], USUAL))
            await asyncio.sleep(0.05)
            link.kill("the server was aborted")
            link.kill()
            await assert_down(answer, match="the server was aborted")
            await link.exited.wait()

    run(main)


FRONT = """
import asyncio, sys
from nepserve.engine import EngineLink
async def main():
    link = EngineLink(device="cpu", loader=sys.argv[1], threads=1)
    await link.start()
    await link.load("toy", sys.argv[2], dtype="float64", backend="auto")
    print(link.pid, flush=True)
    await asyncio.sleep(float(sys.argv[3]))
asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["killed", "killed-while-busy", "exit"])
def test_no_engine_outlives_its_front(how: str) -> None:
    busy = file(load_seconds=60) if how == "killed-while-busy" else file()
    command = [sys.executable, "-c", FRONT, TOY, busy, "0" if how == "exit" else "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as front:
        assert front.stdout is not None
        if how == "killed-while-busy":
            children: list[psutil.Process] = []
            while not (children and "nepserve.engine" in children[0].cmdline()):
                children = psutil.Process(front.pid).children()
                time.sleep(0.02)
            pid = children[0].pid
            time.sleep(0.3)
        else:
            pid = int(front.stdout.readline())
        if how != "exit":
            front.kill()
        front.wait()
        wait_until_gone(pid)


def start_by_hand(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nepserve.engine", "--device", "cpu", "--loader", TOY, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


def test_an_engine_whose_front_has_died_before_it_started() -> None:
    # No process has the number 0, as none has that of a front that is gone.
    assert start_by_hand("--fd", "0", "--parent", "0").returncode == EXIT_ORPHANED


def test_an_engine_that_is_sent_rubbish() -> None:
    import socket

    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"GET / HTTP/1.1\r\n" + bytes(100))
        ended = start_by_hand("--fd", str(theirs.fileno()), "--parent", str(os.getpid()), pass_fds=[theirs.fileno()])
    assert ended.returncode == EXIT_PROTOCOL
    assert "is not a message" in ended.stderr


def test_an_engine_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(match: str) -> None:
        link = EngineLink(device="cpu", loader=TOY)
        with pytest.raises(EngineDown, match=match):
            await link.start()
        assert link.state == "down"
        await link.stop(1.0)

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    run(lambda: main("cannot be started"))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    run(lambda: main("ended with code 1"))
    monkeypatch.setattr(sys, "executable", "/bin/echo")
    run(lambda: main("ended with code 0"))
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_engine_that_never_says_hello(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))

    async def main() -> None:
        link = EngineLink(device="cpu", loader=TOY, start_seconds=0.3)
        with pytest.raises(EngineDown, match=r"it said nothing within 0\.3 s"):
            await link.start()
        slow = EngineLink(device="cpu", loader=TOY)
        starting = asyncio.create_task(slow.start())
        await asyncio.sleep(0.1)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await slow.exited.wait()

    run(main)
    assert psutil.Process().children() == []


def test_a_flood_on_stderr_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    structures = Structures.pack([structure(3, 0, ["Ge"])])

    async def main() -> None:
        async with engine(file(faults={"Ge": "chatter"})) as link:
            found = await link.evaluate("toy", [structures], USUAL)
            assert_same_bits(found.predictions, directly(structures, ORDER))
            await link.stop(10.0)
            assert link.exit is not None
            assert link.exit.stderr[-1] == "x" * 99

    with caplog.at_level(logging.INFO, "nepserve.engine"):
        run(main)
    assert sum(record.getMessage() == "x" * 99 for record in caplog.records) == 10_000


def test_the_engines_log_keeps_its_levels(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with engine(file(faults={"Ge": "raise"}), log_level="INFO") as link:
            await link.evaluate("toy", [fatal()], USUAL)
            await link.stop(10.0)

    with caplog.at_level(logging.DEBUG, "nepserve.engine"):
        run(main)
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert errors[0] == "evaluation of 1 structures failed"
    assert "Traceback (most recent call last):" in errors
    assert "ValueError: the toy trips over a poisoned atom" in errors
    assert all(record.engine_pid for record in caplog.records if record.getMessage() in errors)


def test_a_file_of_the_users_directory_does_not_stand_in_for_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("this Python has no -P")
    (tmp_path / "numpy.py").write_text("raise ImportError('the wrong numpy')")
    monkeypatch.chdir(tmp_path)

    async def main() -> None:
        async with engine(file()) as link:
            found = await link.evaluate("toy", [block(2)], USUAL)
            assert np.isfinite(found.predictions["energy"]).all()

    run(main)
