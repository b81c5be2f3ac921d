"""Which devices a server owns, in words, and how an engine is shown one of them and no other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import NamedTuple

from .settings import SettingsError

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Variables that number the GPUs of a process anew; what ``ROCR_VISIBLE_DEVICES`` hides is gone before they count."""

_MOST = 1024
_LOOK_SECONDS = 120
_COUNT = "import torch; print('gpus', torch.cuda.device_count() if torch.cuda.is_available() else 0)"


class Device(NamedTuple):
    """What one engine gets.

    Attributes:
        name: What it is called: ``cpu``, ``cuda:1``, and with a number where several are alike, ``cpu#2``.
        device: What the engine calls it.
        threads: Threads on a CPU; None leaves it to the libraries.
        environment: Variables of its process.
    """

    name: str
    device: str
    threads: int | None
    environment: dict[str, str]


def devices_of(words: str, threads: int | None) -> list[Device]:
    """The devices that ``words`` stand for: ``all``, numbers of GPUs (``0,1``), or ``cpu:N`` for N engines on the CPU.

    GPUs are numbered as the variables CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES leave them.

    Args:
        words: See above; ``cuda:0,cuda:1`` works, too. (A ROCm build of PyTorch calls its GPUs ``cuda``.)
        threads: Threads of each engine on a CPU; None shares the cores out.

    Raises:
        SettingsError: It stands for none.
    """
    text = words.strip().lower()
    if match := re.fullmatch(r"cpu(?::(\d{1,4}))?", text):
        count = int(match[1] or 1)
        if not 0 < count <= _MOST:
            raise SettingsError(f"--devices {words}: wanted between 1 and {_MOST} engines")
        each = threads or max(1, len(os.sched_getaffinity(0)) // count)
        return [Device("cpu" if count == 1 else f"cpu#{k + 1}", "cpu", each, {}) for k in range(count)]
    if text == "all":
        numbers = list(range(_count_gpus()))
        if not numbers:
            raise SettingsError("--devices all: PyTorch finds no GPU here; --devices cpu:N takes the CPU")
    else:
        parts = [part.strip().removeprefix("cuda:") for part in text.split(",")]
        if not all(part.isascii() and part.isdigit() and int(part) < _MOST for part in parts):
            raise SettingsError(f"--devices {words}: wanted all, numbers of GPUs such as 0,1, or cpu:N")
        numbers = [int(part) for part in parts]
        if len(set(numbers)) < len(numbers):
            raise SettingsError(f"--devices {words}: a GPU is named twice")
    return [Device(f"cuda:{k}", "cuda", threads, only(k)) for k in numbers]


def only(number: int) -> dict[str, str]:
    """Variables that show a process one of the GPUs that this process can see.

    The engine has then no memory on another one, and calls its own the first, whatever it is.

    Raises:
        SettingsError: Fewer are visible.
    """
    said = next((os.environ[name] for name in VISIBLE if os.environ.get(name)), None)
    if said is None:
        entry = str(number)
    else:
        visible = [word.strip() for word in said.split(",")]
        if number >= len(visible):
            raise SettingsError(f"GPU {number} is not among the {len(visible)} that are visible here ({said})")
        entry = visible[number]
    return dict.fromkeys(VISIBLE, entry)


def _count_gpus() -> int:
    """GPUs that PyTorch finds, asked in a process of its own: this one stays without it."""
    try:
        said = subprocess.run(
            [sys.executable, "-c", _COUNT], capture_output=True, text=True, timeout=_LOOK_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SettingsError(f"--devices all: the GPUs cannot be counted: {error}") from None
    match = re.search(r"^gpus (\d+)$", said.stdout, re.MULTILINE)
    if match is None:
        last = (said.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise SettingsError(f"--devices all: the GPUs cannot be counted: {last}")
    return int(match[1])
