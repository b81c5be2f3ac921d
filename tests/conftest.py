"""What every test run has in common: one thread a process, no settings of the developer, nothing left running."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

# Before numpy, torch and numba are imported: two workers of two threads each would fight over two cores.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
# Servers and clients of the tests are on this machine, and have the settings that a test gives them.
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost,::1"
for _name in [name for name in os.environ if name.startswith("NEPSERVE_") and name != "NEPSERVE_REFERENCE_DATA"]:
    del os.environ[_name]
# Choices of backends that were measured on this machine are none of the tests' business.
os.environ["NEPSERVE_CACHE_DIR"] = ""
os.environ["NEPSERVE_TUNE_SECONDS"] = "0"
# Code that numba compiled depends on its sources and the processor alone: kept from run to run, shared by workers.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "numba"))
# Without a GPU, Triton's kernels run in its interpreter; Triton asks when it is imported, whoever does that first.
if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ["TRITON_INTERPRET"] = "1"
# Every process that a test starts inherits it, also those whose parent is gone.
_MARK = "PYTEST_PROCESSES_OF"
os.environ[_MARK] = uuid.uuid4().hex

import psutil  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

_GRACE_SECONDS = 10.0

# An example that takes long on a busy machine is no failure; one that fails must be the same everywhere.
settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("searching", deadline=None, print_blob=True)
settings.load_profile("repeatable" if os.environ.get("CI") else "searching")


@pytest.fixture(scope="session", autouse=True)
def no_process_outlives_the_tests() -> Iterator[None]:
    """Fail if a process that a test started still runs when all tests are done, and end it."""
    yield
    end = time.monotonic() + _GRACE_SECONDS
    # Looked for again, since one that ends may have started another a moment before.
    while (left := _processes()) and time.monotonic() < end:
        psutil.wait_procs(left, timeout=0.1)
    described = [_describe(process) for process in left]
    for process in left:
        process.kill()
    assert not described, f"processes that outlived the tests: {'; '.join(described)}"


def _processes() -> list[psutil.Process]:
    """Processes started by this one, directly or not."""
    found = {p.pid: p for p in psutil.process_iter() if _is_marked(p)}
    found.update((p.pid, p) for p in psutil.Process().children(recursive=True))
    found.pop(os.getpid(), None)
    # Python's own helper of multiprocessing ends with the process that it serves.
    return [p for p in found.values() if "multiprocessing.resource_tracker" not in _describe(p)]


def _is_marked(process: psutil.Process) -> bool:
    try:
        return bool(process.environ().get(_MARK) == os.environ[_MARK])
    except psutil.Error:
        # It is another user's, or it has just ended.
        return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())}"
    except psutil.Error:
        return str(process.pid)
