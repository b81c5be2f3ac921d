"""What was measured, kept on disk: by device, driver, versions and the shape of the model, so that fine-tunes share it.

A file that is damaged, foreign or cannot be written is no reason not to start: it counts as not there.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

import nepcore

from .measure import Report

if TYPE_CHECKING:
    from collections.abc import Callable

    from nepcore.files.nep_txt import NepFile

logger = logging.getLogger("nepcore")

T = TypeVar("T")

_FORMAT = 1
_MOST_BYTES = 1_000_000


def folder() -> Path | None:
    """Where it is kept: ``$NEPSERVE_CACHE_DIR``, else ``nepserve`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.

    None where there is no home, or the variable is empty: nothing is kept then.
    """
    if (said := os.environ.get("NEPSERVE_CACHE_DIR")) is not None:
        return Path(said) if said else None
    if said := os.environ.get("XDG_CACHE_HOME"):
        return Path(said) / "nepserve"
    try:
        return Path.home() / ".cache" / "nepserve"
    except RuntimeError:
        return None


def key_of(model: NepFile, device: torch.device, dtype: str) -> dict[str, Any]:
    """All that a measurement depends on."""
    return {
        "format": _FORMAT,
        "nepserve": nepcore.__version__,
        "dtype": dtype,
        "device": device_of(device),
        "torch": torch.__version__,
        "triton": _version("triton", "pytorch-triton-rocm", "pytorch-triton"),
        "numba": _version("numba"),
        "model": shape_of(model),
    }


def device_of(device: torch.device) -> dict[str, Any]:
    """What computes: name, driver or number of threads."""
    if device.type == "cuda":
        return {
            "name": torch.cuda.get_device_name(device),
            "capability": list(torch.cuda.get_device_capability(device)),
            "driver": _driver(),
            "runtime": str(torch.version.hip or torch.version.cuda),
        }
    return {"name": _processor(), "threads": torch.get_num_threads()}


def shape_of(model: NepFile) -> dict[str, Any]:
    """What the cost of a model depends on; the values of its parameters are not part of it."""
    return {
        "version": model.version,
        "elements": list(model.elements),
        "temperature": model.temperature,
        "zbl": model.zbl,
        "cutoff": [[float(r), float(a)] for r, a in zip(model.cutoff_radial, model.cutoff_angular, strict=True)],
        "n_max": [model.n_max_radial, model.n_max_angular],
        "basis_size": [model.basis_radial, model.basis_angular],
        "l_max": model.l_max,
        "switches": sorted(name for name, on in model.switches.items() if on),
        "hidden": list(model.hidden),
    }


def _driver() -> str:
    version = getattr(torch._C, "_cuda_getDriverVersion", None)  # noqa: SLF001 (there is no public way)
    path = Path("/sys/module", "nvidia" if torch.version.hip is None else "amdgpu", "version")
    try:
        return path.read_text().strip()
    except OSError:
        return str(version()) if version is not None else ""


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # only Linux says
    return platform.processor() or platform.machine()


def _version(*distributions: str) -> str:
    """Version of the first that is installed, empty where none is."""
    versions = (d.version for name in distributions for d in importlib.metadata.distributions(name=name))
    return next(versions, "")


def path_of(key: dict[str, Any], kind: str = "backend") -> Path | None:
    """The file of a key; None where nothing is kept."""
    where = folder()
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return None if where is None else where / f"{kind}-{digest}.json"


def read(key: dict[str, Any]) -> Report | None:
    """What was measured for a key; None where there is nothing that can be used."""
    return _read(key, "backend", lambda data: Report.of_dict(data["report"]))


def write(key: dict[str, Any], report: Report) -> bool:
    """Keep what was measured; says whether that was possible."""
    return _write(key, "backend", {"report": report.to_dict()})


def read_limit(key: dict[str, Any]) -> int | None:
    """Atoms that one call may hold, as learned earlier; None where nothing is known."""

    def positive(data: Any) -> int | None:
        atoms = data["atoms"]
        if atoms is not None and (type(atoms) is not int or atoms < 1):
            raise ValueError(f"{atoms!r} is no number of atoms")
        return atoms

    return _read(key, "limit", positive)


def write_limit(key: dict[str, Any], atoms: int | None) -> bool:
    """Keep how many atoms one call may hold; says whether that was possible."""
    return _write(key, "limit", {"atoms": atoms})


def _read(key: dict[str, Any], kind: str, take: Callable[[Any], T]) -> T | None:
    path = path_of(key, kind)
    if path is None:
        return None
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError("it is far too large")
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["key"] != key:
            raise ValueError("it is of another device or model")
        return take(data)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        logger.warning("%s is not used: %s: %s", path, type(error).__name__, error)
        return None


def _write(key: dict[str, Any], kind: str, content: dict[str, Any]) -> bool:
    path = path_of(key, kind)
    if path is None:
        return False
    text = json.dumps({"key": key, **content}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Renamed into place: whoever reads at the same time finds the old one or the new one.
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=path.stem, suffix=".tmp", delete=False, encoding="utf-8"
        ) as file:
            file.write(text)
        Path(file.name).replace(path)
    except OSError as error:
        logger.warning("what was learned is not kept: %s", error)
        return False
    return True
