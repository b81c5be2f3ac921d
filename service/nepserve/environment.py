"""What a bug report needs to know of a machine: versions, processors, GPUs, the torch build, caches."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import nepcore

PACKAGES = (
    "numpy", "torch", "triton", "pytorch-triton-rocm", "numba", "fastapi", "starlette", "uvicorn", "uvloop",
    "httptools", "pydantic", "pydantic-settings", "orjson", "msgpack", "httpx", "prometheus-client", "typer", "ase",
)  # fmt: skip

VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
    "OMP_WAIT_POLICY", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME", "HOME",
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "LD_PRELOAD", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_",
)  # fmt: skip


def report() -> dict[str, dict[str, Any]]:
    """The report, by section; what is not known is left out. Imports torch where it is installed."""
    return {
        "nepserve": {"version": nepcore.__version__, "location": str(Path(nepcore.__file__).parent)},
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "machine": _machine(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "torch": _torch(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            # Every setting but the secret ones.
            if name in VARIABLES or (name.startswith("NEPSERVE_") and "KEY" not in name)
        },
        "caches": _caches(),
    }


def text(sections: dict[str, dict[str, Any]]) -> str:
    """The report for people, a section a block."""
    blocks = []
    for title, entries in sections.items():
        width = max((len(name) for name in entries), default=0)
        blocks.append("\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in entries.items())]))
    return "\n\n".join(blocks)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    machine: dict[str, Any] = {"system": platform.platform(), "architecture": platform.machine()}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                machine["processor"] = line.partition(":")[2].strip()
                break
    machine["cores"] = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        machine["usable cores"] = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        machine["memory"] = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    with contextlib.suppress(OSError, ValueError):
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        if limit.isdigit():
            machine["memory limit"] = f"{int(limit) / 2**30:.1f} GiB"
    driver = Path("/proc/driver/nvidia/version")
    if driver.is_file():
        with contextlib.suppress(OSError):
            machine["nvidia driver"] = driver.read_text(encoding="utf-8", errors="replace").splitlines()[0]
    amd = Path("/sys/module/amdgpu/version")
    if amd.is_file():
        with contextlib.suppress(OSError):
            machine["amdgpu driver"] = amd.read_text(encoding="utf-8", errors="replace").strip()
    return machine


def _torch() -> dict[str, Any]:
    try:
        import torch
    except ImportError as error:
        return {"not usable": f"{type(error).__name__}: {error}"}
    entries: dict[str, Any] = {"version": torch.__version__, "threads": torch.get_num_threads()}
    if torch.version.cuda:
        entries["CUDA"] = torch.version.cuda
    if getattr(torch.version, "hip", None):
        entries["HIP"] = torch.version.hip
    try:
        count = torch.cuda.device_count()
        entries["GPUs"] = count
        for i in range(count):
            card = torch.cuda.get_device_properties(i)
            kind = getattr(card, "gcnArchName", None) or f"compute capability {card.major}.{card.minor}"
            entries[f"GPU {i}"] = f"{card.name}, {card.total_memory / 2**30:.1f} GiB, {kind}"
    except (RuntimeError, AssertionError) as error:
        # A driver that does not fit its library is what a report is there to show.
        entries["GPUs"] = f"cannot be asked: {str(error).splitlines()[0]}"
    return entries


def _caches() -> dict[str, Any]:
    home = os.environ.get("HOME") or "/"
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path(home) / ".cache")
    places = {
        "nepserve": base / "nepserve",
        "triton": Path(os.environ.get("TRITON_CACHE_DIR") or Path(home) / ".triton"),
    }
    return {name: f"{path} ({_state(path)})" for name, path in places.items()}


def _state(path: Path) -> str:
    nearest = path
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    writable = "writable" if os.access(nearest, os.W_OK) else "not writable"
    return writable if nearest == path else f"not there yet, {writable}"
