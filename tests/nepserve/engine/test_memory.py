from __future__ import annotations

import errno
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nepcore.structures import Structures
from nepserve.engine import memory


class OutOfMemoryError(RuntimeError):
    """Stands for torch.OutOfMemoryError, which is known by its name."""


class AcceleratorError(RuntimeError):
    """Stands for torch.AcceleratorError."""


def caused_by(cause: Exception) -> Exception:
    error = RuntimeError("a compiled model failed")
    error.__cause__ = cause
    return error


def in_handling(first: Exception, *, suppressed: bool = False) -> Exception:
    error = RuntimeError("another thing went wrong then")
    error.__context__ = first
    error.__suppress_context__ = suppressed
    return error


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(OutOfMemoryError("whatever it says"), id="torch"),
        pytest.param(
            RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB"),
            id="cuda-allocator",
        ),
        pytest.param(RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB (GPU 0; ..."), id="hip-allocator"),
        pytest.param(AcceleratorError("CUDA error: out of memory"), id="cuda-runtime"),
        pytest.param(RuntimeError("HIP error: out of memory\nHIP kernel errors might be ..."), id="hip-runtime"),
        pytest.param(RuntimeError("CUDA driver error: out of memory"), id="cuda-driver"),
        pytest.param(RuntimeError("Triton Error [CUDA]: out of memory"), id="triton-cuda"),
        pytest.param(RuntimeError("Triton Error [HIP]:  Code: 2, Messsage: out of memory"), id="triton-hip"),
        pytest.param(RuntimeError("CUDA_ERROR_OUT_OF_MEMORY"), id="cuda-name"),
        pytest.param(RuntimeError("cudaErrorMemoryAllocation"), id="cuda-runtime-name"),
        pytest.param(RuntimeError("hipErrorOutOfMemory"), id="hip-name"),
        pytest.param(
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), id="cublas"
        ),
        pytest.param(RuntimeError("HIPBLAS_STATUS_ALLOC_FAILED"), id="hipblas"),
        pytest.param(RuntimeError("rocblas_status_memory_error"), id="rocblas"),
        pytest.param(RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"), id="cufft"),
        pytest.param(RuntimeError("HIPFFT_ALLOC_FAILED"), id="hipfft"),
        pytest.param(RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED"), id="cusolver"),
        pytest.param(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), id="cudnn"),
        pytest.param(RuntimeError("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), id="cudnn-9"),
        pytest.param(RuntimeError("Failed to allocate 4096 bytes on device 'cuda:0'"), id="kernel-library"),
        pytest.param(RuntimeError("hipMalloc failed"), id="malloc-name"),
        pytest.param(MemoryError(), id="python"),
        pytest.param(np._core._exceptions._ArrayMemoryError((10**6, 10**6), np.dtype(float)), id="numpy"),
        pytest.param(
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
                "to allocate 8000000000000 bytes. Error code 12 (Cannot allocate memory)"
            ),
            id="cpu-allocator",
        ),
        pytest.param(
            RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."), id="windows"
        ),
        pytest.param(RuntimeError("std::bad_alloc"), id="c++"),
        pytest.param(OSError(errno.ENOMEM, "Cannot allocate memory"), id="mmap"),
        pytest.param(caused_by(MemoryError()), id="cause"),
        pytest.param(in_handling(RuntimeError("CUDA out of memory")), id="context"),
    ],
)
def test_out_of_memory_is_recognised(error: Exception) -> None:
    assert memory.is_out_of_memory(error)
    assert not memory.is_device_lost(error)


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(RuntimeError("CUDA error: device-side assert triggered"), id="assert"),
        pytest.param(AcceleratorError("CUDA error: an illegal memory access was encountered"), id="illegal-access"),
        pytest.param(RuntimeError("HIP error: an illegal memory access was encountered"), id="hip-illegal-access"),
        pytest.param(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), id="triton"),
        pytest.param(RuntimeError("CUDA error: unspecified launch failure"), id="launch-failure"),
        pytest.param(RuntimeError("HIP error: unspecified launch failure"), id="hip-launch-failure"),
        pytest.param(RuntimeError("CUDA error: misaligned address"), id="misaligned"),
        pytest.param(RuntimeError("CUDA error: an illegal instruction was encountered"), id="illegal-instruction"),
        pytest.param(RuntimeError("CUDA error: the launch timed out and was terminated"), id="watchdog"),
        pytest.param(RuntimeError("CUDA error: uncorrectable ECC error encountered"), id="ecc"),
        pytest.param(RuntimeError("uncorrectable NVLink error detected during the execution"), id="nvlink"),
        pytest.param(RuntimeError("hipErrorIllegalAddress"), id="hip-name"),
        pytest.param(RuntimeError("cudaErrorLaunchFailure"), id="cuda-name"),
        pytest.param(RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS"), id="driver-name"),
        pytest.param(RuntimeError("HIP error: unknown error"), id="unknown"),
        pytest.param(caused_by(RuntimeError("CUDA error: device-side assert triggered")), id="cause"),
    ],
)
def test_a_lost_device_is_recognised(error: Exception) -> None:
    assert memory.is_device_lost(error)
    assert not memory.is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(
            RuntimeError("out of resource: shared memory, Required: 300000, Hardware limit: 232448."), id="shared"
        ),
        pytest.param(ValueError("operands could not be broadcast together"), id="shapes"),
        pytest.param(RuntimeError("CUDA error: invalid argument"), id="argument"),
        pytest.param(RuntimeError("CUDA error: invalid device ordinal"), id="ordinal"),
        pytest.param(RuntimeError("CUDA error: no kernel image is available for execution on the device"), id="image"),
        pytest.param(OSError(errno.ENOENT, "No such file or directory"), id="file"),
        pytest.param(in_handling(MemoryError(), suppressed=True), id="suppressed"),
    ],
)
def test_other_errors_are_neither(error: Exception) -> None:
    assert not memory.is_out_of_memory(error)
    assert not memory.is_device_lost(error)


def test_a_circle_of_causes_ends() -> None:
    one, two = RuntimeError("one"), RuntimeError("two")
    one.__cause__, two.__cause__ = two, one
    assert not memory.is_out_of_memory(one)


def test_release_frees_what_a_failed_call_holds() -> None:
    class Large:
        alive = 0

        def __init__(self) -> None:
            Large.alive += 1

        def __del__(self) -> None:
            Large.alive -= 1

    def fail() -> None:
        held = Large()
        raise MemoryError(f"while holding {held is not None}")

    try:
        fail()
    except MemoryError as raised:
        error = raised
    assert Large.alive == 1
    memory.release(error)
    assert Large.alive == 0


def test_usage_knows_this_process() -> None:
    used = memory.usage()
    assert used["resident"] > 10_000_000
    assert all(value >= 0 for value in used.values())


def test_a_limit_is_halved_by_failures_and_never_below_one() -> None:
    limit = memory.Limit()
    found = []
    for atoms in (1000, 1000, 600, 100, 1, 1):
        limit.failed(atoms)
        found.append(limit.atoms)
    assert found == [500, 500, 300, 50, 1, 1]


def test_a_limit_grows_slowly_and_is_forgotten_in_the_end() -> None:
    limit = memory.Limit()
    limit.failed(1000)
    history = []
    for _ in range(2000):
        if limit.atoms is None:
            break
        history.append(limit.atoms)
        limit.succeeded(limit.atoms)
    assert limit.atoms is None
    assert history == sorted(history)
    assert len(history) > 16 * 10
    assert max(b / a for a, b in pairwise(history)) < 1.2
    assert max(history) > 2 * 1000


def test_small_calls_say_nothing_about_a_limit() -> None:
    limit = memory.Limit()
    limit.failed(1000)
    for _ in range(500):
        limit.succeeded(10)
    assert limit.atoms == 500


def test_a_failure_starts_the_growth_anew() -> None:
    limit = memory.Limit()
    limit.failed(1000)
    for _ in range(15):
        limit.succeeded(500)
    limit.failed(900)
    for _ in range(15):
        limit.succeeded(450)
    assert limit.atoms == 450


def of_sizes(sizes: list[int]) -> Structures:
    return Structures.from_arrays(sizes, np.full(sum(sizes), 14), np.arange(3.0 * sum(sizes)).reshape(-1, 3))


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 100))
def test_pieces_keep_order_and_limit(sizes: list[int], atoms: int) -> None:
    limit = memory.Limit(atoms)
    pieces = limit.pieces(of_sizes(sizes))
    assert [n for piece in pieces for n in piece.counts.tolist()] == sizes
    for piece in pieces:
        assert piece.n_atoms <= atoms or len(piece) == 1
    for one, two in pairwise(pieces):
        assert one.n_atoms + int(two.counts[0]) > atoms


@given(st.lists(st.floats(1.0, 1e6), min_size=2, max_size=40))
def test_halves_are_as_equal_as_they_can_be(work: list[float]) -> None:
    structures = of_sizes(list(range(1, len(work) + 1)))
    one, two = memory.halves(structures, np.array(work))
    assert len(one) >= 1
    assert len(two) >= 1
    assert np.concatenate([one.counts, two.counts]).tolist() == structures.counts.tolist()
    total = sum(work)
    off = abs(sum(work[: len(one)]) - total / 2)
    assert all(off <= abs(sum(work[:cut]) - total / 2) + 1e-6 * total for cut in range(1, len(work)))


def test_limits_are_kept_and_recalled() -> None:
    kept: list[int | None] = []
    limit = memory.Limit(keep=kept.append)
    limit.recall(None)
    assert limit.atoms is None
    limit.failed(1000)
    assert kept == [500]
    again = memory.Limit(keep=kept.append)
    again.recall(500)
    assert again.atoms == 500
    for _ in range(16):
        again.succeeded(500)
    assert kept[-1] == again.atoms == 551
