"""What a run of ``nepserve predict`` leaves beside its partial output, so that another one can go on with it.

After every block the disk holds the results so far; then a small file says how much that is. A run that was cut off at
any moment, by a signal, a crash or the end of a job, loses the blocks that were under way and no other.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from nepcore.errors import NepError

from .partial_file import partial_name, writing

VERSION = 1


class ResumeError(NepError):
    """A run that cannot be gone on with."""


@dataclass
class State:
    """How far a run is.

    Attributes:
        run: What it was asked, see :func:`description`: a run that is asked something else is another one.
        read: Frames of the input that are done with, those without results among them.
        output: Bytes of the output.
        gpumd: Bytes of GPUMD's files, in the order of their names; None where none are written.
        frames, atoms, failed: As in the result.
        failures: The first of them: frame, line, reason.
        warnings: As in the result.
        squares: Sum and count of each root mean square.
    """

    run: dict[str, Any]
    read: int = 0
    output: int = 0
    gpumd: list[int] | None = None
    frames: int = 0
    atoms: int = 0
    failed: int = 0
    failures: list[tuple[int, int, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    squares: dict[str, tuple[float, int]] = field(default_factory=dict)
    version: int = VERSION


def description(source: str | Path, **asked: Any) -> dict[str, Any]:
    """What makes a run the same run: the input file, by size and time of change, and what it was asked."""
    with writing(source):
        found = Path(source).stat()
    return {"input size": found.st_size, "input changed": found.st_mtime_ns, **asked}


def digest(model: str | Path) -> str:
    """SHA-256 of a model file; empty if it cannot be read, which loading it will say."""
    with suppress(OSError, ValueError):
        return sha256(Path(model).read_bytes()).hexdigest()
    return ""


def state_name(output: str | Path) -> Path:
    """Where the state of a run with this output is."""
    partial = partial_name(Path(os.path.realpath(output)))
    return partial.with_name(partial.name + ".state")


def keep(path: Path, state: State) -> None:
    """Write the state, whole or not at all.

    Raises:
        OutputError: It cannot be written.
    """
    new = path.with_name(path.name + ".new")
    with writing(path):
        with new.open("w", encoding="utf-8") as file:
            json.dump(asdict(state), file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)


def find(path: Path, run: dict[str, Any]) -> State | None:
    """The state that an earlier run left; None if it left none.

    Raises:
        ResumeError: It was asked something else, or its input has changed since; or the file is none of ours.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.get("version") != VERSION:
            raise ResumeError(f"{path}: written by another version; without --resume the run starts anew")
        state = State(**content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ResumeError(f"{path}: not the state of a run: {error}") from error
    # As JSON has it: a tuple is a list there.
    wanted = json.loads(json.dumps(run))
    for name in wanted.keys() | state.run.keys():
        if wanted.get(name) != state.run.get(name):
            raise ResumeError(
                f"{path}: the run was begun with {name} {_shown(state.run.get(name))}, this one has "
                f"{_shown(wanted.get(name))}; without --resume it starts anew"
            )
    return state


def _shown(value: Any) -> str:
    text = "none" if value is None else ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def forget(path: Path) -> None:
    """There is nothing to go on with any more."""
    for name in (path, path.with_name(path.name + ".new")):
        with suppress(OSError):
            name.unlink()
