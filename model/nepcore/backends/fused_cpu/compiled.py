"""The functions that Python calls, compiled for this machine once and kept on disk.

The compiler's own cache knows when the file of a compiled function changed, but not when a file of the functions that
it calls did. Every function here therefore carries a stamp of all sources of this package and of the compiler's
version; the stamp is part of what the cache looks up.

The directory is ``NUMBA_CACHE_DIR`` where that is set, else ``numba`` in ``NEPSERVE_CACHE_DIR``, else in ``nepserve``
in ``XDG_CACHE_HOME`` or ``~/.cache``, else in one of this user's in the directory for temporary files. Where none can
be written every process compiles anew, and says so; so it does, silently, where ``NEPSERVE_CACHE_DIR`` is empty.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import tempfile
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numba
from llvmlite import binding

from . import kernels, mailbox, plan
from .vec import config, features

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger("nepcore")
_lock = threading.Lock()
_built: dict[bool, Compiled] = {}


@dataclass(frozen=True)
class Compiled:
    """The compiled functions.

    Attributes:
        functions: By name; they compile, or come from disk, when they are first called.
        folder: Where they are kept; None if nowhere.
    """

    functions: SimpleNamespace
    folder: Path | None

    def known(self, dtype: str, widths: Any) -> bool:
        """Whether the functions for a dtype and vector widths are on disk."""
        return self.folder is not None and self._mark(dtype, widths).exists()

    def remember(self, dtype: str, widths: Any) -> None:
        """Note that they are.

        Raises:
            OSError: The disk is full or read-only.
        """
        if self.folder is not None:
            self._mark(dtype, widths).touch()

    def _mark(self, dtype: str, widths: Any) -> Path:
        assert self.folder is not None
        machine = hashlib.sha256(repr((binding.get_host_cpu_name(), sorted(features()))).encode()).hexdigest()[:12]
        kind = f"{dtype}-{len(widths.full)}-{len(widths.functions)}"
        return self.folder / f"compiled-{kind}-py{sys.version_info[0]}{sys.version_info[1]}-{machine}-{_stamp():014x}"


def compiled(*, cached: bool = True) -> Compiled:
    """The compiled functions.

    Args:
        cached: Whether to use the disk at all.
    """
    with _lock:
        if cached not in _built:
            _built[cached] = _with_cache() if cached else Compiled(_build(_stamp(), False), None)
        return _built[cached]


def _with_cache() -> Compiled:
    before = config.CACHE_DIR
    try:
        for directory in _directories():
            if _writable(directory):
                config.CACHE_DIR = str(directory)
                return Compiled(_build(_stamp(), True), directory)
    finally:
        config.CACHE_DIR = before
    if os.environ.get("NEPSERVE_CACHE_DIR") != "":
        _log.warning("no directory for compiled code can be written (set NUMBA_CACHE_DIR); each start compiles anew")
    return Compiled(_build(_stamp(), False), None)


def _writable(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError:
        return False
    return True


def _directories() -> Iterator[Path]:
    """Where compiled code may go, best first."""
    if config.CACHE_DIR:
        yield Path(config.CACHE_DIR)
        return
    if (said := os.environ.get("NEPSERVE_CACHE_DIR")) is not None:
        if said:
            yield Path(said) / "numba"
        return
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(home):
        yield Path(home) / "nepserve" / "numba"
    if hasattr(os, "getuid"):
        shared = Path(tempfile.gettempdir()) / f"nepserve-{os.getuid()}"
        try:
            shared.mkdir(mode=0o700, exist_ok=True)
            status = shared.lstat()
        except OSError:
            return
        # What lies there is executed: nobody else may have put it there.
        if status.st_uid == os.getuid() and not status.st_mode & 0o077 and not shared.is_symlink():
            yield shared / "numba"


@cache
def _stamp() -> int:
    """A number that changes with the sources of this package and with the compiler."""
    digest = hashlib.sha256(f"{numba.__version__} {binding.llvm_version_info}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:7], "big")


def _build(stamp: int, cache: bool) -> SimpleNamespace:
    """The functions, with the stamp as a constant in each of them."""
    compile_ = numba.njit(cache=cache, nogil=True, error_model="numpy")

    @compile_
    def expect(counts: Any, cells: Any, pbc: Any, cutoff: Any) -> Any:
        return plan.expect(counts, cells, pbc, cutoff), stamp

    @compile_
    def prepare(
        job: Any, counts: Any, numbers: Any, table: Any, positions: Any, cells: Any, pbc: Any, cutoff: Any,
        n_types: Any, expected: Any, wanted: Any,
    ) -> Any:  # fmt: skip
        return plan.prepare(
            job, counts, numbers, table, positions, cells, pbc, cutoff, n_types, expected, wanted
        ), stamp  # fmt: skip

    @compile_
    def publish(
        job: Any, counts: Any, start: Any, stop: Any, hands: Any, pairs: Any, temperatures: Any, model: Any, desks: Any
    ) -> Any:  # fmt: skip
        return plan.publish(job, counts, start, stop, hands, pairs, temperatures, model, desks), stamp

    @compile_
    def work(mails: Any, job: Any, hand: Any, like: Any, widths: Any, sleeps: Any) -> int:
        # One entry for all hands: the kernels are in each entry that reaches them, and take long to compile.
        mailbox.work(mails, job, hand, like, widths, sleeps)
        return stamp

    @compile_
    def call(mails: Any, hands: Any, sleeps: Any) -> Any:
        return mailbox.call(mails, hands, sleeps), stamp

    @compile_
    def hand_out(mails: Any, hands: Any, job: Any, sleeps: Any) -> Any:
        return mailbox.hand_out(mails, hands, job, sleeps), stamp

    @compile_
    def withdraw(mails: Any, hands: Any) -> Any:
        return mailbox.withdraw(mails, hands), stamp

    @compile_
    def dismiss(mails: Any, hands: Any) -> int:
        mailbox.dismiss(mails, hands)
        return stamp

    @compile_
    def sum_structures(
        job: Any, counts: Any, energy: Any, virial: Any, energies: Any, forces: Any, virials: Any
    ) -> int:  # fmt: skip
        kernels.sum_structures(job, counts, energy, virial, energies, forces, virials)
        return stamp

    return SimpleNamespace(
        expect=expect, prepare=prepare, publish=publish, work=work, call=call, hand_out=hand_out, withdraw=withdraw,
        dismiss=dismiss, sum_structures=sum_structures,
    )  # fmt: skip
