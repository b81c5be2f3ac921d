"""Measuring: the wrong are caught, the slow lose, time runs out, nothing stops a start."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from nepcore import Structures, synthetic
from nepcore.backends import candidates, choices, measure, resolve
from nepcore.backends.candidates import Candidate
from nepcore.calculator import Calculator

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from nepcore.structures import Predictions

CPU = torch.device("cpu")
MODEL = synthetic.make_model(("Si", "C"), n_max=(2, 2), basis_size=(3, 3), l_max=2, hidden=(5,), seed=1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEPSERVE_CACHE_DIR", str(tmp_path / "cache"))
    # Another test may have compiled it in this process.
    monkeypatch.setattr(candidates, "is_compiled", lambda *_: False)
    return tmp_path / "cache"


class Clock:
    """Time that passes when a planted backend says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Planted:
    """A backend that takes the time it is told to, and spoils its answers as it is told to."""

    def __init__(self, clock: Clock, seconds: dict[str, float], spoil: Callable[[Predictions], None]) -> None:
        self.name = "planted"
        self.inner = candidates.make("density", MODEL, CPU, "float64", 48e6)
        self.clock, self.seconds, self.spoil = clock, seconds, spoil

    def run(self, structures: Structures, properties: frozenset[str]) -> Generator[int, None, Predictions]:
        found = yield from self.inner.run(structures, properties)
        self.clock.now += self.seconds[measure.classes_of(structures.counts)[0]]
        self.spoil(found)
        return found


def nothing(found: Predictions) -> None:
    pass


def plant(
    name: str, clock: Clock, small: float, large: float, spoil: Callable[[Predictions], None] = nothing, **more: Any
) -> Candidate:
    return Candidate(name, lambda *_: Planted(clock, {"small": small, "large": large}, spoil), **more)


def batches() -> list[measure.Batch]:
    one = measure.representative(MODEL, "cpu")[0]
    big = Structures.pack([measure._crystal(MODEL, (7, 6, 6), np.random.default_rng(0))])
    return [one, measure.Batch("big", "large", big)]


BATCHES = batches()


def run(
    among: list[Candidate], clock: Clock, seconds: float = 1e6, earlier: measure.Report | None = None
) -> tuple[measure.Report, list[dict[str, Any]]]:
    said: list[dict[str, Any]] = []
    steps = measure.measure(
        MODEL, CPU, "float64", 48e6, seconds, among=among, batches=BATCHES, clock=clock, earlier=earlier
    )
    result: list[measure.Report] = []

    def finish() -> Generator[dict[str, Any], None, None]:
        result.append((yield from steps))

    said.extend(finish())
    return result[0], said


def verdicts(report: measure.Report) -> dict[str, str]:
    return {row.name: row.verdict for row in report.rows}


def test_representative_batches_are_ordinary_matter() -> None:
    model = synthetic.make_model(("H", "O", "Si", "Pb"), temperature=True, seed=2)
    for batch in measure.representative(model, "cpu"):
        assert model.admission.problems(batch.structures) == {}
        assert set(measure.classes_of(batch.structures.counts)) == {batch.size_class}
        density = batch.structures.counts / np.abs(np.linalg.det(batch.structures.cells))
        assert ((density > 0.02) & (density < 0.2)).all()
    assert max(b.structures.n_atoms for b in measure.representative(model, "cuda")) == 32_000


def test_the_fastest_of_each_class_is_chosen_and_a_slow_one_loses() -> None:
    clock = Clock()
    report, said = run(
        [plant("a", clock, 1.0, 5.0), plant("slow", clock, 9.0, 90.0), plant("b", clock, 2.0, 3.0)], clock
    )
    assert report.complete
    assert report.choice == {"small": "a", "large": "b"}
    assert verdicts(report) == {
        "a": "chosen for small structures; 1.7× the time for large ones",
        "slow": "9.0× the time for small ones; 30.0× the time for large ones",
        "b": "chosen for large structures; 2.0× the time for small ones",
    }
    assert [s["what"] for s in said if "," not in s["what"]] == ["reference values", "a", "slow", "b"]


def spoiled(name: str, amount: float) -> Callable[[Predictions], None]:
    def spoil(found: Predictions) -> None:
        found.values[name].reshape(-1)[0] += amount

    return spoil


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (spoiled("energy", 1e-3), "wrong"),
        (spoiled("forces", 1e-4), "wrong"),
        (spoiled("virial", 1e-2), "wrong"),
        (spoiled("forces", float("nan")), "wrong"),
        (lambda _: 1 / 0, "failed: ZeroDivisionError"),
        (lambda found: found.values.pop("forces"), "failed: KeyError"),
    ],
    ids=["energy", "forces", "virial", "nan", "error", "missing"],
)
def test_a_wrong_or_failing_one_is_caught_and_not_used(spoil: Callable[[Predictions], None], why: str) -> None:
    clock = Clock()
    report, _ = run([plant("bad", clock, 0.1, 0.1, spoil), plant("good", clock, 1.0, 1.0)], clock)
    assert report.choice == {"small": "good", "large": "good"}
    assert verdicts(report)["bad"].startswith(why)


def test_time_runs_out() -> None:
    clock = Clock()
    first = plant("first", clock, 1.0, 1.0, rank=-1)
    dear = plant("dear", clock, 0.1, 0.1, preparation=lambda *_: 500.0, rank=1)
    late = plant("late", clock, 0.1, 0.1, rank=2)
    absent = plant("absent", clock, 0.1, 0.1, unfit=lambda *_: "it needs another device")
    report, _ = run([dear, absent, late, first], clock, seconds=3.0)
    assert not report.complete
    assert report.choice == {"small": "first", "large": "first"}
    said = verdicts(report)
    assert said["dear"] == "not tried: 0 s of the 3 s were left, and its preparation takes about 500 s"
    assert said["late"].startswith("not tried")
    assert said["absent"] == "not here: it needs another device"


def test_a_slow_machine_makes_a_choice_all_the_same() -> None:
    clock = Clock()
    slow = plant("slow", clock, 100.0, 400.0, rank=-1)
    late = plant("late", clock, 0.1, 0.1, rank=2)
    report, _ = run([late, slow], clock, seconds=3.0)
    assert report.choice == {"small": "slow", "large": "slow"}
    assert verdicts(report)["late"].startswith("not tried")


def test_nothing_to_choose_from() -> None:
    report, _ = run([], Clock())
    assert report.choice == {}
    assert resolve.of_report(report, MODEL, CPU, "float32", 48e6, "measured") is None


def test_a_report_survives_json() -> None:
    clock = Clock()
    report, _ = run([plant("a", clock, 1.0, 5.0)], clock)
    assert measure.Report.of_dict(report.to_dict()) == report


def test_a_calculator_tunes_itself_once(monkeypatch: pytest.MonkeyPatch) -> None:
    among = [candidates.get("mulsum"), candidates.get("density")]
    monkeypatch.setattr(candidates, "every", lambda: tuple(among))
    monkeypatch.setattr(measure, "representative", lambda *_: BATCHES)
    monkeypatch.setattr(resolve, "by_rule", lambda *_, **__: "density")
    tuned = Calculator.of(MODEL, device="cpu")
    assert tuned.choice["how"] == "unmeasured"
    said = list(tuned.tune(1e6))
    assert said[0]["stage"] == "tune"
    assert tuned.choice["how"] == "measured"
    assert list(tuned.tune(1e6)) == []
    again = Calculator.of(MODEL, device="cpu")
    assert again.choice["how"] == "cached"
    assert again.choice["choice"] == tuned.choice["choice"]
    assert list(again.tune(1e6)) == []
    assert list(again.tune(1e6, again=True)) != []
    for name in ("density", "rule"):
        asked = Calculator.of(MODEL, device="cpu", backend=name)
        assert list(asked.tune(1e6, again=True)) == []


def test_measuring_that_fails_leaves_the_rule(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> object:
        raise RuntimeError("no batches today")

    monkeypatch.setattr(measure, "representative", broken)
    calculator = Calculator.of(MODEL, device="cpu")
    with caplog.at_level(logging.WARNING, logger="nepcore"):
        list(calculator.tune(10.0))
    assert calculator.choice == {"how": "unmeasured", "backend": "loop"}
    assert "no batches today" in caplog.text
    assert choices.read(choices.key_of(MODEL, CPU, "float32")) is None


def interrupt(found: Predictions) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_keeps_what_was_measured() -> None:
    clock = Clock()
    among = [
        plant("quick", clock, 1.0, 2.0), plant("slow", clock, 2.0, 3.0),
        plant("ended", clock, 0.5, 0.5, interrupt), plant("left out", clock, 0.1, 0.1),
    ]  # fmt: skip
    report, _ = run(among, clock)
    assert report.choice == {"small": "quick", "large": "quick"}
    assert report.interrupted
    assert not report.complete
    verdicts = {row.name: row.verdict for row in report.rows}
    assert verdicts["ended"] == "stopped by an interrupt"
    assert verdicts["left out"] == "not tried: stopped by an interrupt"
    assert measure.Report.of_dict(report.to_dict()) == report
    # What was known of the others before still counts.
    before, _ = run([among[3], plant("quick", clock, 9.0, 9.0)], clock)
    assert "interrupted" not in before.to_dict()
    report, _ = run(among, clock, earlier=before)
    assert report.choice == {"small": "left out", "large": "left out"}
    assert report.rows[3].verdict == "chosen for small and large structures; measured earlier"
    # Nothing is chosen where nothing was measured.
    report, _ = run(among[2:], clock)
    assert report.choice == {}
