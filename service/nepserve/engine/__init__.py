"""The process that owns one device, and the front's way to it. The front's side imports no torch.

>>> link = EngineLink(device="cpu")
>>> await link.start()
>>> await link.load("si", "nep.txt", dtype="float32", backend="auto")
>>> answer = await link.evaluate("si", [block], frozenset({"energy", "forces"}))
>>> answer.predictions["energy"]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import EngineDown, EngineError, ProbeError

if TYPE_CHECKING:
    from .link import EngineLink, Evaluated
    from .spawn import Exit


def __getattr__(name: str) -> Any:
    # The child imports this package as well, and has no use for asyncio.
    if name in {"EngineLink", "Evaluated"}:
        from . import link

        return getattr(link, name)
    if name == "Exit":
        from .spawn import Exit

        return Exit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["EngineDown", "EngineError", "EngineLink", "Evaluated", "Exit", "ProbeError"]
