"""Forces of a served model in LAMMPS, through its Python interface and ``fix external``.

    >>> from lammps import lammps
    >>> lmp = lammps()
    >>> lmp.file("in.setup")                     # ... with: fix nep all external pf/callback 1 1
    >>> nep = attach(lmp, "nep", "http://127.0.0.1:8000", elements=["Si", "Ge"])
    >>> nep.run(1000)

Energy, virial, and both per atom are handed over, so that ``pe``, the pressure, ``compute pe/atom``, ``stress/atom``
and ``heat/flux`` are right, in units ``metal`` and ``real``. Atoms may be renumbered, deleted, added, change type and
cross boundaries; boxes may be triclinic and change.

If no complete answer comes, the run ends at that step. Within :meth:`Attached.run` the error is raised again; in a run
that was started otherwise (``lmp.command``, ``lmp.file``) LAMMPS ends the process with its own error, so that a script
does not go on. Forces are NaN at that step; none of an earlier step are used again.

With several MPI ranks, which mpi4py must be there for, rank 0 alone talks to the server; atoms are sorted by their
ids, so that results do not depend on the number of ranks.
"""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from nepcore.elements import NUMBERS

from .errors import NepserveError
from .forcefield import as_client, check_elements, evaluator
from .units import LAMMPS_ENERGY, LAMMPS_ORDER, components

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .forcefield import Evaluator
    from .http import Client

# Of LAMMPS' library interface: LMP_ERROR_ALL and LMP_SIZE_COLS.
_ERROR_ALL = 2
_COLUMNS = 5


class RunStoppedError(RuntimeError):
    """A run ended before its last step for a reason that is not the server's."""


def attach(
    lmp: Any,
    fix_id: str,
    url: str | Client,
    elements: Sequence[str | None],
    model: str | None = None,
    *,
    temperature: float | None = None,
    per_atom: bool = True,
    full_virials: str | None = None,
    **options: Any,
) -> Attached:
    """Let a served model be the callback of a ``fix external``.

    Args:
        lmp: A ``lammps.lammps``, with its box made and the fix defined: ``fix ID all external pf/callback 1 1``.
        fix_id: That ID.
        url: Address of the nepserve server, or a client.
        elements: The chemical symbol of each atom type, in the order of the types; None for a type that the model has
            nothing to do with: its atoms are left out, and get neither energy nor force from it.
        model: Name of the model; None for the client's, or the server's only one.
        temperature: K, for temperature models.
        per_atom: Whether energies and virials of atoms are fetched, too, at those steps at which a compute needs them.
            Without them such computes give NaN.
        full_virials: Name W of a ``fix property/atom d2_W 9`` that is to hold the virial of each atom with all nine
            components, xx xy xz yx yy yz zx zy zz, in units of energy: what LAMMPS' six cannot tell. Σ W_j v_j is
            the potential part of the heat flux of a many-body model.
        options: ``api_key``, ``timeout``, ``retries``, ``dtype``, ``priority``, ``verify``, ``steps``: of the client.

    Raises:
        ValueError: Elements that do not fit the types or the model, units other than metal and real, or several
            ranks without mpi4py.
        NepserveError: The server does not answer, or has no such model.
    """
    client = as_client(url, options)
    style = lmp.extract_global("units")
    if style not in LAMMPS_ENERGY:
        raise ValueError(f"units {style} are not supported; there are: {', '.join(LAMMPS_ENERGY)}")
    if not lmp.has_id("fix", fix_id):
        raise ValueError(f"LAMMPS has no fix {fix_id!r}; define it first: fix {fix_id} all external pf/callback 1 1")
    numbers = _numbers(elements, lmp.extract_setting("ntypes"))
    if full_virials is not None and not per_atom:
        raise ValueError("full_virials are of atoms, and per_atom is off")
    comm = _communicator(lmp)
    _check(comm, client, model, numbers)
    found = Attached(
        lmp, fix_id, client, numbers, LAMMPS_ENERGY[style], comm, model, temperature, per_atom, full_virials
    )
    lmp.set_fix_external_callback(fix_id, found._callback, None)  # noqa: SLF001 - LAMMPS' side of the same thing
    return found


class Attached:
    """A served model at work in LAMMPS.

    Attributes:
        error: What stopped the last run; None while all is well.
        calls: How often forces were handed over.
    """

    def __init__(
        self,
        lmp: Any,
        fix_id: str,
        client: Client,
        numbers: NDArray[np.uint8],
        unit: float,
        comm: Any,
        model: str | None,
        temperature: float | None,
        per_atom: bool,
        full_virials: str | None,
    ) -> None:
        self.error: BaseException | None = None
        self.calls = 0
        self._lmp = lmp
        self._fix = fix_id.encode()
        self._client = client
        self._numbers = numbers
        self._unit = unit
        self._comm = comm
        self._model = model
        self._temperature = temperature
        self._per_atom = per_atom
        self._property = None if full_virials is None else f"d2_{full_virials}"
        self._raising = False
        self._field: Evaluator | None = None
        self._known: tuple[NDArray[np.uint8], tuple[int, ...]] | None = None
        self._shares: _Shares | None = None
        # What the order of the atoms was worked out from, and the order.
        self._tags = self._types = np.zeros(0, np.int64)
        self._order: tuple[NDArray[np.intp], NDArray[np.uint8]] | None = None

    def run(self, what: int | str) -> None:
        """Run so many steps, or another command that runs (``minimize 0 1e-6 100 1000``).

        Raises:
            NepserveError: No forces came. The run ended at that step, whose forces and velocities are NaN.
            RunStoppedError: Fewer steps were made than asked for, for another reason (``timer timeout``, ``fix halt``).
        """
        self.error = None
        before = self._lmp.extract_global("ntimestep")
        self._raising = True
        try:
            self._lmp.command(f"run {what}" if isinstance(what, int) else what)
        except Exception:
            # What LAMMPS makes of NaN forces is the consequence, not the cause.
            if self.error is None:
                raise
        finally:
            self._raising = False
        if self.error is not None:
            raise self.error
        made = self._lmp.extract_global("ntimestep") - before
        if isinstance(what, int) and made != what:
            raise RunStoppedError(f"LAMMPS made {made} of {what} steps")

    def _callback(
        self, _: object, step: int, n: int, tags: NDArray[Any], x: NDArray[np.float64], f: NDArray[np.float64]
    ) -> None:
        """What LAMMPS calls in every step, on every rank. Nothing may leave it: LAMMPS would go on."""
        try:
            if self.error is None:
                self._step(step, n, np.asarray(tags).reshape(-1), x, f)
        except BaseException as error:  # an interrupt, too, must stop the run and not vanish
            self.error = error
        if self.error is not None:
            f[:] = np.nan
            self._stop(step)

    def _step(self, step: int, n: int, tags: NDArray[Any], x: NDArray[np.float64], f: NDArray[np.float64]) -> None:
        """One step: all atoms to rank 0, forces from the server, and back to where the atoms are."""
        types = self._lmp.numpy.extract_atom("type")[:n] if n else np.zeros(0, np.int32)
        per_atom = self._per_atom and self._asked(step)
        if self._shares is None or len(self._shares.energies) != n:
            self._shares = _Shares(n, self._property is not None)
        shares = self._shares
        if self._comm is None:
            energy, virial = self._evaluate(tags[:n], types, x[:n], f, shares, per_atom)
        else:
            energy, virial = self._together(tags[:n], types, x[:n], f, shares, per_atom)
        if self._property is not None:
            self._store(n, shares.nine)
        # LAMMPS' own wrappers copy number by number in Python, which takes longer than the physics.
        library, pointer = self._lmp.lib, self._lmp.lmp
        library.lammps_fix_external_set_energy_global(pointer, self._fix, energy)
        library.lammps_fix_external_set_virial_global(pointer, self._fix, (ctypes.c_double * 6)(*virial))
        library.lammps_fix_external_set_energy_peratom(pointer, self._fix, shares.energies_pointer)
        library.lammps_fix_external_set_virial_peratom(pointer, self._fix, shares.six_pointer)
        self.calls += 1

    def _asked(self, step: int) -> bool:
        """Whether anything in LAMMPS looks at energies or virials of atoms at this step; fetching them takes time."""
        if self._property is not None:
            return True
        when = self._lmp.extract_global("eflag_atom"), self._lmp.extract_global("vflag_atom")
        # An older LAMMPS does not say.
        return None in when or step in when

    def _store(self, n: int, virials: NDArray[np.float64] | None) -> None:
        name = self._property
        if self._lmp.extract_atom_size(name, _COLUMNS) != 9:
            raise ValueError(f"there is no {name} of nine columns; define it: fix ID all property/atom {name} 9")
        if n:
            self._lmp.numpy.extract_atom(name)[:n] = virials

    def _together(
        self,
        tags: NDArray[Any],
        types: NDArray[Any],
        x: NDArray[np.float64],
        f: NDArray[np.float64],
        shares: _Shares,
        per_atom: bool,
    ) -> tuple[float, list[float]]:
        """:meth:`_evaluate` for all ranks; every one of them raises if rank 0 did."""
        parts = self._comm.gather((tags.copy(), types.copy(), x.copy()), root=0)
        answer: Any = None
        pieces: list[Any] | None = None
        if parts is not None:
            try:
                ids, kinds, places = (np.concatenate(column) for column in zip(*parts, strict=True))
                forces, whole = np.zeros_like(places), _Shares(len(ids), shares.nine is not None)
                answer = self._evaluate(ids, kinds, places, forces, whole, per_atom)
                ends = np.cumsum([len(part[0]) for part in parts])[:-1]
                pieces = list(zip(*(np.split(array, ends) for array in (forces, *whole.arrays)), strict=True))
            except BaseException as error:  # the others wait for what is broadcast here, whatever happened
                answer = error
        answer = self._comm.bcast(answer, root=0)
        if isinstance(answer, BaseException):
            raise answer
        for target, piece in zip((f, *shares.arrays), self._comm.scatter(pieces, root=0), strict=True):
            target[:] = piece
        energy, virial = answer
        return energy, virial

    def _evaluate(
        self,
        tags: NDArray[Any],
        types: NDArray[Any],
        x: NDArray[np.float64],
        f: NDArray[np.float64],
        shares: _Shares,
        per_atom: bool,
    ) -> tuple[float, list[float]]:
        """Energy and virial (6), in LAMMPS' units and order; those of atoms, and forces, go to where they belong."""
        order, z = self._sorted(tags, types)
        if len(order) < len(tags):
            for array in (f, *shares.arrays):
                array[:] = 0.0
        if not per_atom:
            for array in shares.arrays:
                array[:] = np.nan
        if not len(order):
            return 0.0, [0.0] * 6
        low, high, xy, yz, xz, periodic, _ = self._lmp.extract_box()
        cell = np.array([
            [high[0] - low[0], 0.0, 0.0], [xy, high[1] - low[1], 0.0], [xz, yz, high[2] - low[2]],
        ])  # fmt: skip
        found = self._evaluator(z, tuple(periodic)).one(x[order], cell, per_atom=per_atom)
        scale = 1.0 / self._unit
        f[order] = found.forces * scale
        if per_atom:
            assert found.energies is not None
            assert found.virials is not None
            shares.energies[order] = found.energies * scale
            shares.six[order] = components(found.virials, LAMMPS_ORDER) * scale
            if shares.nine is not None:
                shares.nine[order] = found.virials.reshape(-1, 9) * scale
        return found.energy * scale, (components(found.virial, LAMMPS_ORDER) * scale).tolist()

    def _sorted(self, tags: NDArray[Any], types: NDArray[Any]) -> tuple[NDArray[np.intp], NDArray[np.uint8]]:
        """Where the atoms that count are, in the order of their ids, and their atomic numbers."""
        if self._order is None or not (np.array_equal(tags, self._tags) and np.array_equal(types, self._types)):
            if len(tags) and int(tags.min()) < 1:
                raise ValueError("the atoms have no ids (atom_modify id no), by which their order is known")
            z = self._numbers[types]
            used = np.flatnonzero(z)
            order = used[np.argsort(tags[used], kind="stable")]
            self._order = order, z[order]
            self._tags, self._types = tags.copy(), types.copy()
        return self._order

    def _evaluator(self, z: NDArray[np.uint8], periodic: tuple[int, ...]) -> Evaluator:
        same = self._known is not None and self._known[1] == periodic and np.array_equal(self._known[0], z)
        if self._field is None or not same:
            if self._field is not None:
                self._field.close()
            self._field = evaluator(
                self._client, z, np.array(periodic, bool), model=self._model, temperature=self._temperature,
                per_atom=self._per_atom,
            )  # fmt: skip
            self._known = z, periodic
        return self._field

    def _stop(self, step: int) -> None:
        """End the run at this step."""
        self._lmp.lib.lammps_force_timeout(self._lmp.lmp)
        if self._raising:
            return
        # Nobody will look at the error: LAMMPS writes it to screen and log, and ends the process. So do all ranks.
        text = f"nepserve: no forces at step {step}: {type(self.error).__name__}: {self.error}"
        sys.stdout.flush()
        if self._comm is None or self._comm.rank == 0:
            print(text, file=sys.stderr, flush=True)  # noqa: T201 - screen and log may both be off
        self._lmp.lib.lammps_error(self._lmp.lmp, _ERROR_ALL, text.encode())


class _Shares:
    """Values of the atoms of one rank, in memory that LAMMPS reads.

    Attributes:
        energies: (n,).
        six: Virials in LAMMPS' six components, (n, 6).
        nine: Virials, (n, 9); None if nobody wants them.
        arrays: Those that there are.
        energies_pointer: Address of ``energies``, for C.
        six_pointer: Addresses of the rows of ``six``, for C.
    """

    def __init__(self, n: int, nine: bool) -> None:
        self.energies = np.zeros(n)
        self.six = np.zeros((n, 6))
        self.nine = np.zeros((n, 9)) if nine else None
        self.arrays = [self.energies, self.six, *([] if self.nine is None else [self.nine])]
        self.energies_pointer = self.energies.ctypes.data_as(ctypes.POINTER(ctypes.c_double))
        self._rows = (self.six.ctypes.data + 48 * np.arange(max(n, 1))).astype(np.uintp)
        self.six_pointer = self._rows.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(ctypes.c_double)))


def _numbers(elements: Sequence[str | None], n_types: int) -> NDArray[np.uint8]:
    """Atomic numbers by atom type, which LAMMPS counts from 1; 0 for those left out."""
    if isinstance(elements, str):
        raise ValueError(f"elements must be a list with a symbol for each atom type, not the string {elements!r}")
    if len(elements) != n_types:
        raise ValueError(
            f"{len(elements)} elements for {n_types} atom types; wanted one each, in the order of the types, "
            "and None for a type to leave out"
        )
    for k, symbol in enumerate(elements):
        if symbol is not None and symbol not in NUMBERS:
            raise ValueError(f"atom type {k + 1}: {symbol!r} is not a chemical symbol (exact spelling), nor None")
    if all(symbol is None for symbol in elements):
        raise ValueError("every atom type is left out; nothing would be computed")
    return np.array([0, *(0 if symbol is None else NUMBERS[symbol] for symbol in elements)], np.uint8)


def _communicator(lmp: Any) -> Any:
    """The MPI communicator of LAMMPS; None for one rank."""
    if lmp.extract_setting("world_size") == 1:
        return None
    comm = lmp.get_mpi_comm() if lmp.has_mpi4py else None
    if comm is None:
        raise ValueError("several MPI ranks need the package mpi4py, built for the MPI that LAMMPS uses")
    return comm


def _check(comm: Any, client: Client, model: str | None, numbers: NDArray[np.uint8]) -> None:
    """Ask the server, on rank 0, whether the model has the elements; all ranks raise if not."""
    fault: Exception | None = None
    if comm is None or comm.rank == 0:
        try:
            check_elements(client, model, numbers[numbers > 0].tolist())
        except (NepserveError, ValueError) as error:
            fault = error
    if comm is not None:
        fault = comm.bcast(fault, root=0)
    if fault is not None:
        raise fault


__all__ = ["Attached", "RunStoppedError", "attach"]
