"""What surrounds a step: tables that stand for formulas, and arrays made ahead by a thread."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import trainings
from nepcore.physics import basis, harmonics, invariants
from nepcore.training import polynomials
from nepcore.training.batches import assemble, bucket, stream
from nepcore.training.dataset import Dataset
from nepcore.training.parameters import start_model

SWITCHES = ("q222", "q1111", "q112", "q123", "q233", "q134")
CPU = torch.device("cpu")


@pytest.mark.parametrize("l_max", [1, 2, 4, 8])
def test_harmonics_by_tables(l_max: int) -> None:
    generator = torch.Generator().manual_seed(l_max)
    vectors = torch.randn((40, 3), generator=generator, dtype=torch.float64)
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    found = polynomials.values(unit, polynomials.harmonics_tables(l_max, torch.float64, CPU))
    torch.testing.assert_close(found[:, 0].T, harmonics.harmonics(unit.T, l_max), rtol=1e-12, atol=1e-10)
    weight = torch.randn(found[:, 0].T.shape, generator=generator, dtype=torch.float64)
    slope = (found[:, 1:4] * weight.T[:, None]).sum(dim=2).T
    torch.testing.assert_close(slope, harmonics.contracted_gradient(unit.T, weight, l_max), rtol=1e-11, atol=1e-8)
    torch.testing.assert_close(found[:, 4], (unit[:, :, None] * found[:, 1:4]).sum(dim=1), rtol=1e-11, atol=1e-8)


@pytest.mark.parametrize("switches", [(), ("q222",), SWITCHES], ids=["none", "q222", "all"])
@pytest.mark.parametrize("l_max", [2, 4])
def test_invariants_by_tables(switches: tuple[str, ...], l_max: int) -> None:
    generator = torch.Generator().manual_seed(1)
    s = torch.randn((30, harmonics.width(l_max)), generator=generator, dtype=torch.float64)
    slope = torch.randn((30, l_max + len(switches)), generator=generator, dtype=torch.float64)
    tables = polynomials.invariants_tables(switches, l_max, torch.float64, CPU)
    found, expected = polynomials.invariants_of(s, tables), invariants.invariants(s.T, l_max, switches)
    torch.testing.assert_close(found.T, expected, rtol=1e-12, atol=1e-12)
    found = polynomials.gradient_of(s, slope, tables)
    torch.testing.assert_close(found.T, invariants.gradient(s.T, slope.T, l_max, switches), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_radial_functions_without_recurrence(dtype: torch.dtype, tolerance: float) -> None:
    r = torch.linspace(0.4, 9.0, 500, dtype=torch.float64)
    cutoff = torch.full_like(r, 8.0)
    expected = basis.radial_basis(r, cutoff, 13)
    f, df = polynomials.radial_functions(r.to(dtype), cutoff.to(dtype), 13)
    for found, wanted in ((f, expected[0]), (df, expected[1])):
        error = (found.T.to(torch.float64) - wanted).abs().max()
        assert error <= tolerance * wanted.abs().max()
    assert (f[r >= 8.0] == 0).all()
    assert (df[r >= 8.0] == 0).all()


def data() -> Dataset:
    settings = trainings.settings()
    return Dataset.of(trainings.frames(6), start_model(settings, (1, 1)), settings)


def test_a_thread_makes_what_is_made_without_it() -> None:
    found = data()
    steps = [[np.array([0, 3])], [], [np.array([5]), np.array([1, 2])], [np.array([4])]]
    one = list(stream(found, iter(steps), pin=False, pad=True, ahead=2))
    other = list(stream(found, steps, pin=False, pad=True, ahead=0))
    assert [len(parts) for parts in one] == [1, 0, 2, 1]
    for ours, theirs in zip(one, other, strict=True):
        for (a, w), (b, v) in zip(ours, theirs, strict=True):
            assert w == v
            assert a.rows == b.rows
            assert torch.equal(a.vectors, b.vectors)
            assert torch.equal(a.energy, b.energy)


def test_a_stream_that_is_left_ends_its_threads() -> None:
    before = threading.active_count()
    source = stream(data(), ([np.array([i % 6])] for i in range(10**6)), pin=False, pad=False, ahead=3)
    next(source)
    assert threading.active_count() > before
    source.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_what_goes_wrong_in_the_thread_is_raised() -> None:
    source = stream(data(), [[np.array([0])], [np.array([77])]], pin=False, pad=False, ahead=3)
    next(source)
    with pytest.raises(IndexError):
        next(source)


@pytest.mark.parametrize("n", [1, 64, 65, 1000, 8000, 123_457])
def test_sizes_come_in_steps_of_a_thirtieth(n: int) -> None:
    assert n <= bucket(n) <= 1.04 * n + 16
    assert bucket(bucket(n)) == bucket(n)


def test_arrays_can_be_moved_in_one_piece() -> None:
    arrays = assemble(data(), np.array([1, 4]), pad=True)
    copy = arrays.at(arrays.blob.clone())
    assert copy.rows == arrays.rows
    for name in ("vectors", "neighbors", "types", "frame", "forces", "energy", "virial", "has_virial"):
        assert torch.equal(getattr(copy, name), getattr(arrays, name))
        assert getattr(copy, name).data_ptr() != getattr(arrays, name).data_ptr()
