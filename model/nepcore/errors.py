"""The errors of nepcore: what is wrong, where, and the numbers a caller can act on.

Text counts atoms, structures, frames and lines from 1, as files and people do. Attributes count from 0, as arrays do.
"""

from __future__ import annotations

from pathlib import Path


class NepError(Exception):
    """Base of all errors that nepcore raises on purpose."""


class ModelFileError(NepError):
    """A model file (``nep.txt``) that cannot be used.

    Attributes:
        path: The file.
        line: Line number, counted from 1; None if the fault is not in one line.
        reason: What is wrong, without file and line.
    """

    def __init__(self, path: str | Path, line: int | None, reason: str) -> None:
        self.path = Path(path)
        self.line = line
        self.reason = reason
        where = f"{path}" if line is None else f"{path}, line {line}"
        super().__init__(f"{where}: {reason}")

    def __reduce__(self) -> tuple[type, tuple[Path, int | None, str]]:
        return type(self), (self.path, self.line, self.reason)


class InputFileError(NepError):
    """A structure or input file that cannot be read.

    Attributes:
        path: The file (``"<request>"`` for a body that came over the network).
        frame: Index of the structure in the file, counted from 0; None if it is not about one structure.
        line: Line number, counted from 1; None if unknown.
        reason: What is wrong: key, token found, what was wanted.
    """

    def __init__(self, path: str | Path, frame: int | None, line: int | None, reason: str) -> None:
        self.path = str(path)
        self.frame = frame
        self.line = line
        self.reason = reason
        where = [str(path)]
        if frame is not None:
            where.append(f"frame {frame + 1}")
        if line is not None:
            where.append(f"line {line}")
        super().__init__(f"{', '.join(where)}: {reason}")

    def __reduce__(self) -> tuple[type, tuple[str, int | None, int | None, str]]:
        return type(self), (self.path, self.frame, self.line, self.reason)


class StructureError(NepError):
    """A structure that cannot be evaluated. Its batch mates are not affected.

    Attributes:
        code: A stable word, one a fault (see the list below).
        reason: What is wrong, in a sentence that names the field and, where there is one, the atom (from 1).
        field: The input field at fault (``positions``, ``cell``, ``numbers``, ``pbc``, ``temperature``), or None.
        atoms: Indices of the atoms concerned, from 0, in the structure's own order.

    Codes: ``non_finite`` (NaN or infinity in the input), ``out_of_range`` (a number too large to compute with),
    ``bad_shape``, ``bad_value``, ``unknown_element``, ``singular_cell``, ``coincident_atoms``, ``too_dense``,
    ``too_large``, ``missing_temperature``, ``non_finite_result``, ``out_of_memory``, ``empty``, ``unknown_field``,
    ``missing_field``, ``ambiguous``.
    """

    def __init__(self, code: str, reason: str, *, field: str | None = None, atoms: tuple[int, ...] = ()) -> None:
        self.code = code
        self.reason = reason
        self.field = field
        self.atoms = tuple(int(a) for a in atoms)
        super().__init__(reason)

    def __reduce__(self) -> tuple[object, tuple[str, str, str | None, tuple[int, ...]]]:
        return _structure_error, (self.code, self.reason, self.field, self.atoms)


def _structure_error(code: str, reason: str, field: str | None, atoms: tuple[int, ...]) -> StructureError:
    return StructureError(code, reason, field=field, atoms=atoms)


class ModelError(NepError):
    """A model that cannot do what was asked of it (no such backend, unknown property, device not there)."""
