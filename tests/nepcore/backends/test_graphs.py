"""Graphs of small batches: sizes and bounds; on a GPU also that a replay gives what evaluation gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import crystals
from nepcore import ModelError, synthetic
from nepcore.backends import graphs
from nepcore.calculator import Calculator
from nepcore.structures import PROPERTIES


def test_buckets_are_few_and_waste_little() -> None:
    sizes = sorted({graphs.bucket(n) for n in range(1, graphs.SMALL + 1)})
    assert sizes[:6] == [16, 24, 32, 48, 64, 96]
    assert sizes[-1] == graphs.SMALL
    assert len(sizes) < 20
    assert all(n <= graphs.bucket(n) <= max(16, 1.5 * n) for n in range(1, graphs.SMALL + 1))
    large = range(graphs.SMALL + 1, graphs.LARGEST + 1, 17)
    assert all(n <= graphs.bucket(n) <= 1.07 * n for n in large)
    assert len({graphs.bucket(n) for n in large}) <= 64
    assert graphs.bucket(64_000) == 65_536
    assert graphs.bucket(graphs.LARGEST) == graphs.LARGEST
    assert graphs.bucket(graphs.LARGEST + 1) == graphs.LARGEST + 1


def test_a_size_is_captured_when_it_comes_again() -> None:
    ledger = graphs.Ledger(1000.0)
    assert not ledger.wants((1, 16))
    assert not ledger.wants((2, 16))
    assert ledger.wants((1, 16))


def test_memory_and_number_are_bounded() -> None:
    ledger = graphs.Ledger(1000.0)
    for size in (600, 600):
        ledger.wants((size,))
        assert ledger.wants((size,))
        ledger.captured(size)
    assert ledger.bytes == 1200
    assert not ledger.wants((600,))
    assert not graphs.Ledger(1000.0).wants((1,), 1000.0)
    for size in (900.0, 1100.0):
        ledger = graphs.Ledger(1000.0)
        ledger.wants((1,), size)
        assert ledger.wants((1,), size) is (size < 1000.0), "a large one that does not fit is not captured"
    many = graphs.Ledger(1e9)
    for n in range(2 * graphs.MOST_GRAPHS):
        many.wants((n,))
        if many.wants((n,)):
            many.captured(1)
    assert many.graphs == graphs.MOST_GRAPHS


def test_graphs_are_of_gpus() -> None:
    model = synthetic.make_model(("Si",), seed=1)
    with pytest.raises(ModelError, match=r"density\+graphs cannot be used: graphs are captured on a GPU, not on cpu"):
        Calculator.of(model, device="cpu", backend="density+graphs")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or HIP device")
@pytest.mark.parametrize("backend", ["density+graphs", "mulsum+graphs", "bmm+graphs"])
@pytest.mark.parametrize("elements", [("Si",), ("Si", "C")], ids=["one type", "two types"])
def test_a_replay_gives_what_evaluation_gives(backend: str, elements: tuple[str, ...]) -> None:
    model = synthetic.make_model(elements, switches=("q222", "q1111"), zbl="universal", seed=3)
    captured = Calculator.of(model, device="cuda", dtype="float64", backend=backend)
    plain = Calculator.of(model, device="cpu", dtype="float64", backend="loop")
    for turn in range(4):
        items = [crystals.random_structure(7 * turn + k, elements, n=5 + 3 * k) for k in range(4)]
        wanted, found = plain.evaluate(items, PROPERTIES), captured.evaluate(items, PROPERTIES)
        for name in PROPERTIES:
            assert np.allclose(found[name], wanted[name], rtol=1e-10, atol=1e-10, equal_nan=True), (turn, name)
    (report,) = captured.graphs.values()
    assert report["graphs"] >= 1
    assert report["bytes"] <= report["most_bytes"] + 200e6
