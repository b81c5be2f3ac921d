"""GPUMD's output files: columns, normalisation, order, signs, markers, and the right row for each structure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from nepcore.errors import StructureError
from nepcore.files import gpumd_out, xyz
from nepcore.structures import Predictions, Structures

if TYPE_CHECKING:
    from pathlib import Path

W = np.array([[1.0, 4, 6], [4, 2, 5], [6, 5, 3]])
SIX = np.array([1.0, 2, 3, 4, 5, 6])
"""W as xx yy zz xy yz zx."""


def predictions(structures: Structures, errors: dict[int, StructureError] | None = None) -> Predictions:
    B, N = len(structures), structures.n_atoms
    values = {
        "energy": -10.0 * np.arange(1, B + 1),
        "forces": np.arange(3.0 * N).reshape(N, 3),
        "virial": W * structures.counts[:, None, None] * np.arange(1, B + 1)[:, None, None],
    }
    for i in errors or {}:
        values["energy"][i] = np.nan
        values["virial"][i] = np.nan
        values["forces"][structures.offsets[i] : structures.offsets[i + 1]] = np.nan
    return Predictions(structures.counts, values, structures.pbc.all(axis=1), errors or {})


def crystals(*counts: int) -> Structures:
    N = sum(counts)
    cells = np.stack([np.diag([2.0, 3.0, 4.0 + i]) for i in range(len(counts))])
    return Structures.from_arrays(counts, [14] * N, np.zeros((N, 3)), cells)


def written(directory: Path) -> dict[str, np.ndarray]:
    return {name.split("_")[0]: np.loadtxt(directory / name, ndmin=2) for name in gpumd_out.NAMES}


def test_columns_units_and_signs(tmp_path: Path) -> None:
    structures = crystals(2, 1)
    text = xyz.dumps(structures).decode()
    labels = f'energy=-8 virial="{" ".join(map(str, (W * 2).ravel()))}" pbc='
    text = text.replace("pbc=", labels, 1).replace("pos:R:3", "pos:R:3:forces:R:3", 1)
    text = text.replace("Si 0.0 0.0 0.0\n", "Si 0 0 0 0.5 1e-7 -12345.678\n", 2)
    frames = xyz.parse(text)
    with gpumd_out.Writer(tmp_path / "made" / "here") as writer:
        writer.add(structures, predictions(structures), frames)
    found = written(tmp_path / "made" / "here")
    assert found["energy"].tolist() == [[-5, -4], [-20, -1e6]]
    assert found["force"].tolist() == [
        [0, 1, 2, 0.5, 1e-7, -12345.7], [3, 4, 5, 0.5, 1e-7, -12345.7], [6, 7, 8, -1e6, -1e6, -1e6],
    ]  # fmt: skip
    np.testing.assert_array_equal(found["virial"], [[*SIX, *SIX], [*(2 * SIX), *[-1e6] * 6]])
    # A positive virial is a positive (compressive) stress: W / V in GPa.
    np.testing.assert_allclose(found["stress"][0], [*(SIX * 2 / 24 * 160.2177)] * 2, rtol=1e-5)
    np.testing.assert_allclose(found["stress"][1], [*(2 * SIX / 30 * 160.2177), *[-1e6] * 6], rtol=1e-5)


def test_the_format_is_that_of_gpumd(tmp_path: Path) -> None:
    structures = crystals(1)
    with gpumd_out.Writer(tmp_path) as writer:
        writer.add(structures, predictions(structures))
    assert (tmp_path / "energy_train.out").read_bytes() == b"-10 -1e+06\n"
    assert (tmp_path / "force_train.out").read_bytes() == b"0 1 2 -1e+06 -1e+06 -1e+06\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(gpumd_out.NAMES)


def test_lower_triangle_of_a_label_that_is_not_symmetric(tmp_path: Path) -> None:
    structures = crystals(1)
    text = xyz.dumps(structures).decode().replace("pbc=", 'virial="1 99 99 4 2 99 6 5 3" pbc=')
    with gpumd_out.Writer(tmp_path) as writer:
        writer.add(structures, predictions(structures), xyz.parse(text))
    assert written(tmp_path)["virial"][0, 6:].tolist() == SIX.tolist()


def test_every_structure_has_its_rows(tmp_path: Path) -> None:
    """Rows are those of the input's frames, whichever have labels, fail, or could not be read."""
    structures = crystals(1, 2, 1, 2)
    texts = xyz.dumps(structures).decode()
    frames = xyz.parse(texts.replace("pbc=", 'virial="1 0 0 0 1 0 0 0 1" pbc=', 1))
    failed = predictions(structures, {2: StructureError("too_dense", "too dense")})
    with gpumd_out.Writer(tmp_path) as writer:
        writer.add(structures.slice(0, 2), failed.slice(0, 2), frames.select([0, 1]))
        writer.skip(3)
        writer.add(structures.slice(2, 4), failed.slice(2, 4), frames.select([2, 3]))
    found = written(tmp_path)
    assert np.isnan(found["energy"][:, 0]).tolist() == [False, False, True, True, False]
    assert found["energy"][[0, 1, 4], 0].tolist() == [-10, -10, -20]
    assert np.isnan(found["force"][:, 0]).tolist() == [False] * 3 + [True] * 4 + [False] * 2
    assert (found["virial"][:, 6] == -1e6).tolist() == [False, True, True, True, True]
    for name in ("virial", "stress"):
        assert np.isnan(found[name][:, 0]).tolist() == [False, False, True, True, False]


def test_no_stress_without_full_periodicity(tmp_path: Path) -> None:
    structures = Structures.from_arrays(
        [1, 1],
        [14, 14],
        np.zeros((2, 3)),
        [np.diag([2.0, 3, 30]), np.zeros((3, 3))],
        [[True, True, False], [False] * 3],
    )
    with gpumd_out.Writer(tmp_path) as writer:
        writer.add(structures, predictions(structures))
    found = written(tmp_path)
    assert np.isnan(found["stress"][:, :6]).all()
    assert (found["stress"][:, 6:] == -1e6).all()
    assert np.isfinite(found["virial"]).all()


def test_names_come_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "energy_train.out").write_text("old\n")
    structures = crystals(1)
    writer = gpumd_out.Writer(tmp_path)
    writer.add(structures, predictions(structures))
    assert (tmp_path / "energy_train.out").read_text() == "old\n"
    writer.abandon()
    assert (tmp_path / "energy_train.out").read_text() == "old\n"
    assert (tmp_path / "energy_train.out.partial").read_text() == "-10 -1e+06\n"
    with pytest.raises(RuntimeError, match="stop"), gpumd_out.Writer(tmp_path):
        raise RuntimeError("stop")
    assert (tmp_path / "energy_train.out").read_text() == "old\n"
    with gpumd_out.Writer(tmp_path):
        pass
    assert (tmp_path / "energy_train.out").read_text() == ""


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    structures = crystals(1)
    with gpumd_out.Writer(tmp_path) as writer:
        with pytest.raises(ValueError, match="predictions lack forces, virial"):
            writer.add(structures, Predictions(structures.counts, {"energy": np.zeros(1)}, np.ones(1, bool)))
        with pytest.raises(ValueError, match="same structures"):
            writer.add(structures, predictions(crystals(1, 1)))
