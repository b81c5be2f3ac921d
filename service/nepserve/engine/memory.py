"""Out of memory, and devices that are lost: how errors of many allocators and runtimes are told apart, and how much
a call may hold. Knows torch only if somebody else imported it."""

from __future__ import annotations

import errno
import gc
import re
import sys
import traceback
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from nepcore.structures import Structures

# Shared memory and registers of a kernel run out, too ("out of resource: shared memory"): those are not meant here,
# as a smaller batch would not help.
_NO_MEMORY = re.compile(
    r"""
    out\ of\ memory                                 # CUDA and HIP, their drivers, torch, Triton, XPU, MPS
    | (CUDA|HIP|CU)\w*_?ERROR_?OUT_?OF_?MEMORY      # error names in place of texts
    | hipErrorOutOfMemory | cudaErrorMemoryAllocation
    | (CU|HIP)\w+_(STATUS_)?ALLOC_FAILED            # cuBLAS, hipBLAS, cuFFT, hipFFT, cuSOLVER, cuSPARSE, cuDNN
    | DEVICE_ALLOCATION_FAILED
    | roc\w+_status_memory_error                    # rocBLAS, rocSOLVER, rocFFT
    | can(no|')t\ allocate\ memory                  # DefaultCPUAllocator, strerror(ENOMEM)
    | not\ enough\ memory
    | (failed|unable)\ to\ allocate                 # numpy, Warp, kernels of our own
    | (cuda|hip)Malloc\w*\ failed
    | std::bad_alloc
    """,
    re.VERBOSE | re.IGNORECASE,
)

# After one of these every further call on the device fails until the process ends.
_LOST = re.compile(
    r"""
    device-side\ assert | hipErrorAssert
    | illegal\ memory\ access | ErrorIllegalAddress
    | illegal\ instruction\ was | ErrorIllegalInstruction
    | misaligned\ address | ErrorMisalignedAddress
    | unspecified\ launch\ failure | ErrorLaunchFailure
    | launch\ timed\ out | ErrorLaunchTimeOut
    | hardware\ stack\ error | ErrorHardwareStackError
    | invalid\ (program\ counter|address\ space) | ErrorInvalidPc
    | uncorrectable\ (ECC|NVLink) | ErrorECCUncorrectable | hipErrorECCNotCorrectable
    | CUDA_ERROR_(ILLEGAL_ADDRESS|LAUNCH_FAILED|ASSERT|ECC_UNCORRECTABLE|MISALIGNED_ADDRESS|LAUNCH_TIMEOUT)
    | hipErrorIllegalState | context\ is\ destroyed | ErrorContextIsDestroyed
    | (GPU|device)\ (is|has\ been)\ (lost|removed) | fallen\ off\ the\ bus
    | (CUDA|HIP)\ error:\ (unknown\ error|an\ unknown\ error|driver\ shutting\ down)
    """,
    re.VERBOSE | re.IGNORECASE,
)

_GROW_AFTER = 16
"""Full calls that must succeed before the limit is raised."""

_GROW_BY = 1.1
_FORGET = 4.0
"""A limit that grew to this multiple of the smallest size that ever failed is dropped: the cause has gone."""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and what it was raised from: compiled models wrap the error of the allocator."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        current = left.pop()
        if current is not None and id(current) not in seen:
            seen.add(id(current))
            yield current
            left += [current.__cause__, None if current.__suppress_context__ else current.__context__]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether less at once might succeed: an allocator of host or device had nothing left to give."""
    for one in _chain(error):
        if isinstance(one, MemoryError) or (isinstance(one, OSError) and one.errno == errno.ENOMEM):
            return True
        if any(kind.__name__ == "OutOfMemoryError" for kind in type(one).__mro__) or _NO_MEMORY.search(str(one)):
            return True
    return False


def is_device_lost(error: BaseException) -> bool:
    """Whether the device will fail every further call of this process."""
    return any(_LOST.search(str(one)) for one in _chain(error))


def release(error: BaseException | None = None) -> None:
    """Let go of what a failed call holds: the frames of ``error``, garbage, and the device's cached blocks."""
    if error is not None:
        for one in list(_chain(error)):
            if one.__traceback__ is not None:
                # The frames of the failed call keep its arrays alive as long as the exception lives.
                traceback.clear_frames(one.__traceback__)
            one.__traceback__ = None
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def settle() -> None:
    """Collect what the loading or unloading of a model left behind, now instead of in the middle of a request.

    What stays (torch alone is some hundred thousand objects) is then not looked at by later collections.
    """
    gc.unfreeze()
    release()
    gc.freeze()


def usage() -> dict[str, Any]:
    """Memory in use, bytes: ``resident`` of this process; ``device_allocated``, ``device_reserved``, ``device_free``
    and ``device_total`` where a GPU is in use. What is not known is left out."""
    found: dict[str, Any] = {}
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
    except OSError:
        pass  # only Linux says
    else:
        import resource

        found["resident"] = pages * resource.getpagesize()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        found |= {
            "device_allocated": torch.cuda.memory_allocated(),
            "device_reserved": torch.cuda.memory_reserved(),
            "device_free": free,
            "device_total": total,
        }
    return found


@dataclass
class Limit:
    """Atoms that one call may hold, learned from failures.

    Attributes:
        atoms: The limit; None as long as nothing failed.
        splits: Batches cut because memory ran out.
        keep: Called with each new limit, to keep it for the next start.
    """

    atoms: int | None = None
    splits: int = 0
    keep: Callable[[int | None], None] | None = None
    _failed: int | None = None
    _full: int = 0

    def failed(self, atoms: int) -> None:
        """A call with ``atoms`` ran out of memory: allow half of it from now on."""
        self._failed = atoms if self._failed is None else min(self._failed, atoms)
        half = max(1, atoms // 2)
        self.atoms = half if self.atoms is None else min(self.atoms, half)
        self._full = 0
        self._changed()

    def _changed(self) -> None:
        if self.keep is not None:
            self.keep(self.atoms)

    def recall(self, atoms: int | None) -> None:
        """Begin with a limit that was learned earlier."""
        if atoms is not None:
            self.atoms, self._failed = atoms, 2 * atoms

    def succeeded(self, atoms: int) -> None:
        """A call went well; the limit grows after enough calls that came near it."""
        if self.atoms is None or self._failed is None or 2 * atoms < self.atoms:
            return
        self._full += 1
        if self._full >= _GROW_AFTER:
            self._full = 0
            self.atoms = int(self.atoms * _GROW_BY) + 1
            if self.atoms > _FORGET * self._failed:
                self.atoms = self._failed = None
            self._changed()

    def pieces(self, structures: Structures) -> list[Structures]:
        """Cut a block into runs of structures within the limit; a structure larger than it stands alone."""
        if self.atoms is None or structures.n_atoms <= self.atoms or len(structures) < 2:
            return [structures]
        cuts = [0]
        offsets = structures.offsets
        while cuts[-1] < len(structures):
            fits = int(np.searchsorted(offsets, offsets[cuts[-1]] + self.atoms, side="right")) - 1
            cuts.append(max(fits, cuts[-1] + 1))
        return [structures.slice(a, b) for a, b in pairwise(cuts)]


def halves(structures: Structures, work: NDArray[np.float64]) -> tuple[Structures, Structures]:
    """Cut two or more structures in two blocks of about equal ``work`` (B,), each of at least one structure."""
    done = np.cumsum(work)
    middle = 1 + int(np.argmin(np.abs(done[:-1] - done[-1] / 2)))
    return structures.slice(0, middle), structures.slice(middle, len(structures))
