"""Whole trainings: they learn, end, go on, and survive what can happen to them."""

from __future__ import annotations

import json
import os
import pickle
import signal
import threading
from collections import deque
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import trainings
from nepcore.calculator import Calculator
from nepcore.errors import InputFileError, ModelError, NepError
from nepcore.files import nep_txt
from nepcore.synthetic import make_model
from nepcore.training import (
    CheckpointError,
    Progress,
    RunDirectory,
    Settings,
    SettingsError,
    Training,
    TrainingError,
    train,
)  # fmt: skip
from nepcore.training.batches import Plan
from nepcore.training.dataset import split

if TYPE_CHECKING:
    from pathlib import Path

STAGES = {"stage2": True, "start_stage2": 4, "epochs": 6, "average": 2, "valid_ratio": 0.2}


def run(training: Training) -> list[Progress]:
    return list(training.run())


def numbers(record: Progress) -> dict[str, Any]:
    """What a record says of the training, without times."""
    timed = ("seconds", "seconds_left", "frames_per_second", "messages")
    return {k: v for k, v in record.as_dict().items() if k not in timed}


def the_same(one: Any, other: Any) -> bool:
    return nep_txt.dumps(one) == nep_txt.dumps(other)


def test_it_learns_what_the_teacher_knows(tmp_path: Path) -> None:
    frames, unseen = trainings.frames(24, sizes=(8,)), trainings.frames(6, sizes=(8,), seed=100)
    settings = trainings.settings(epochs=150, batch=6, neuron=(16,), lr=0.02, lr_scheduler="cosine", stop_lr=1e-4)
    records: list[Progress] = []
    models = train(settings, frames, unseen, directory=tmp_path, device="cpu", progress=records.append)
    first, last = records[0], records[-2]
    assert (last.kind, records[-1].kind, last.epoch, last.step) == ("epoch", "finished", 150, 600)
    for name in ("energy", "force", "virial"):
        assert getattr(last.train, name) < 0.25 * getattr(first.train, name)
    assert last.valid is not None
    assert first.valid is not None
    assert last.valid.force < 0.6 * first.valid.force  # type: ignore[operator]
    # What the files say is what was reported: errors of the last parameters over the validation frames.
    found = Calculator.load(tmp_path / "nep_final.txt", device="cpu", dtype="float64", backend="density").evaluate(
        unseen.structures, ["energy", "forces"]
    )
    assert np.sqrt(np.mean((found["forces"] - unseen.forces) ** 2)) == pytest.approx(last.valid.force, rel=1e-5)
    assert the_same(nep_txt.read(tmp_path / "nep_best.txt"), models.best)
    assert nep_txt.read(tmp_path / "nep_final.txt").mn_radial >= 1  # type: ignore[operator]


def test_the_offset_is_exact() -> None:
    frames = trainings.frames(6)
    frames = replace(frames, energy=frames.energy - 2000.0 * frames.structures.counts)
    model = train(trainings.settings(epochs=2), frames, device="cpu").final
    found = Calculator.of(model, device="cpu", dtype="float64", backend="loop").evaluate(frames.structures, ["energy"])
    error = (found["energy"] - frames.energy) / frames.structures.counts
    assert abs(error.mean()) < 1e-4  # eight digits of an offset of 2000 eV
    assert np.abs(error).max() < 5.0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
def test_interrupted_and_resumed_is_uninterrupted(tmp_path: Path, stop: int, dtype: str) -> None:
    """Between epochs, across the change of stage, and within the average."""
    frames = trainings.frames(10)
    settings = trainings.settings(**STAGES, dtype=dtype)
    whole = Training(settings, frames, device="cpu", directory=tmp_path / "whole")
    expected = run(whole)
    first = Training(settings, frames, device="cpu", directory=tmp_path / "parts")
    seen = []
    for record in first.run():
        seen.append(record)
        if record.epoch == stop:
            first.stop()
    assert [r.kind for r in seen] == ["epoch"] * stop + ["stopped"]
    second = Training(settings, frames, device="cpu", directory=tmp_path / "parts", resume="auto")
    assert second.resumed == tmp_path / "parts" / "checkpoint.pt"
    seen = seen[:-1] + run(second)
    assert [numbers(r) for r in seen] == [numbers(r) for r in expected]
    for name in ("best", "final", "average"):
        one, other = (getattr(RunDirectory(tmp_path / d), name).read_bytes() for d in ("whole", "parts"))
        assert one == other
    assert [r.step for r in seen] == sorted(r.step for r in seen)


@pytest.mark.parametrize("steps", [1, 2, 5, 9])
def test_resumed_within_an_epoch(tmp_path: Path, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = trainings.frames(10)
    settings = trainings.settings(**STAGES)
    expected = run(Training(settings, frames, device="cpu"))
    first = Training(settings, frames, device="cpu", directory=tmp_path)
    real, made = first._stepper.step, []

    def step(*arguments: Any) -> None:
        real(*arguments)
        made.append(1)
        if len(made) == steps:
            first.stop()

    monkeypatch.setattr(first._stepper, "step", step)
    before = run(first)
    assert before[-1].kind == "stopped"
    assert before[-1].step == steps
    second = Training(settings, frames, device="cpu", directory=tmp_path, resume=tmp_path / "checkpoint.pt")
    after = [r for r in [*before[:-1], *run(second)] if r.kind != "step"]
    assert [numbers(r) for r in after] == [numbers(r) for r in expected]


def tensor_bytes(root: object) -> int:
    """Bytes of all tensors that an object holds, itself or through others of the training."""
    seen: set[int] = set()
    held: dict[int, int] = {}
    waiting = [root]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
        elif isinstance(thing, dict):
            waiting += thing.values()
        elif isinstance(thing, (list, tuple, deque)):
            waiting += thing
        elif type(thing).__module__.startswith("nepcore"):
            waiting += vars(thing).values()
    return sum(held.values())


def test_what_is_on_the_device_follows_the_batch_and_not_the_frames() -> None:
    """Counted: what a step is given, and all that a training holds but its data, which stay on the host."""

    def counted(n_frames: int, batch: int) -> tuple[int, int, int]:
        one = trainings.frames(1, sizes=(8,))
        frames = type(one).concatenate([one] * n_frames)
        training = Training(trainings.settings(epochs=2, batch=batch, valid_ratio=0.25), frames, device="cpu")
        given = []
        real = training._stepper.step

        def step(parts: Any, labels: Any) -> None:
            given.append(sum(arrays.blob.nbytes for arrays, _ in parts))
            real(parts, labels)

        training._stepper.step = step  # type: ignore[method-assign]
        run(training)
        data = tensor_bytes([training._data, training._valid])
        training._data = training._valid = None  # type: ignore[assignment]
        return max(given), tensor_bytes(training), data

    few, many, wide = counted(8, 3), counted(64, 3), counted(64, 12)
    assert many[:2] == few[:2]
    assert many[2] > 7 * few[2]
    assert wide[0] > 3 * many[0]
    assert wide[1] == many[1]


def test_the_same_seed_is_the_same_training_and_another_is_not() -> None:
    frames = trainings.frames(6)
    models = [train(trainings.settings(seed=seed), frames, device="cpu").final for seed in (3, 3, 4)]
    assert the_same(models[0], models[1])
    assert not the_same(models[0], models[2])


def test_other_data_are_refused_unless_asked_for(tmp_path: Path) -> None:
    frames, more = trainings.frames(6), trainings.frames(9)
    train(trainings.settings(epochs=2), frames, device="cpu", directory=tmp_path)
    with pytest.raises(CheckpointError, match=r"6 frames to train on and 0 .* then, 9 and 0 now"):
        Training(trainings.settings(), more, device="cpu", directory=tmp_path, resume="auto")
    changed = replace(frames, energy=frames.energy + np.eye(6)[2])
    with pytest.raises(CheckpointError, match="as many frames, but other numbers"):
        Training(trainings.settings(), changed, device="cpu", directory=tmp_path, resume="auto")
    training = Training(
        trainings.settings(epochs=4), more, device="cpu", directory=tmp_path, resume="auto", allow_new_data=True
    )
    assert [r.epoch for r in run(training)] == [3, 4, 4]


def test_a_torn_checkpoint_is_noticed_and_the_one_before_is_used(tmp_path: Path) -> None:
    frames = trainings.frames(6)
    training = Training(trainings.settings(epochs=6), frames, device="cpu", directory=tmp_path)
    for record in islice(training.run(), 5):
        if record.epoch in {2, 4}:
            training._save()
    files = RunDirectory(tmp_path)
    content = files.checkpoint.read_bytes()
    files.checkpoint.write_bytes(content[: len(content) // 2])
    again = Training(trainings.settings(epochs=6), frames, device="cpu", directory=tmp_path, resume="auto")
    assert again.resumed == files.previous_checkpoint
    assert again.epochs == 2
    files.previous_checkpoint.write_bytes(b"")
    with pytest.raises(CheckpointError, match="damaged"):
        Training(trainings.settings(epochs=6), frames, device="cpu", directory=tmp_path, resume="auto")


def test_a_checkpoint_with_code_in_it_is_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    class Hostile:
        def __reduce__(self) -> tuple[Any, tuple[str, ...]]:
            return os.mkdir, (str(ran),)

    plain, torch_made = tmp_path / "a.pt", tmp_path / "b.pt"
    plain.write_bytes(pickle.dumps({"values": "{}", "tensors": Hostile()}))
    torch.save({"values": "{}", "tensors": Hostile()}, torch_made)
    for path in (plain, torch_made):
        with pytest.raises(CheckpointError, match=r"more than tensors and text|no checkpoint"):
            Training(trainings.settings(), trainings.frames(3), device="cpu", resume=path)
    assert not ran.exists()


def test_a_step_that_is_not_finite_is_named_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = replace(trainings.frames(6), path="train.xyz", indices=np.arange(10, 16))
    settings = trainings.settings(epochs=2)
    training = Training(settings, frames, device="cpu")
    data = training._data
    # A force label of frame 12 turns into nonsense behind the reader's back.
    data.labels.forces[data.offsets[1]] = np.inf
    records = run(training)
    said = [m for r in records for m in r.messages]
    assert said[0].startswith("epoch 1, step ")
    assert said[0].endswith("was undone: train.xyz, frame 12: the forces term is not finite")
    assert len([m for m in said if "undone" in m]) == 2
    assert np.isfinite(records[-1].loss)
    assert all(np.isfinite(a).all() for a in (training.models().final.w0, training.models().final.c_radial))


def test_steps_that_never_come_right_end_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(trainings.settings(epochs=50, batch=1), trainings.frames(6), device="cpu")
    training._data.labels.energy[:] = np.nan
    with pytest.raises(TrainingError, match=r"made\.xyz, frame \d: the energy term .* smaller lr"):
        run(training)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_signals_save_and_end(tmp_path: Path, number: signal.Signals) -> None:
    assert threading.current_thread() is threading.main_thread()
    before = signal.getsignal(number)
    training = Training(trainings.settings(epochs=1000), trainings.frames(6), device="cpu", directory=tmp_path)
    records = []
    for record in training.run():
        records.append(record)
        if record.epoch == 3 and record.kind == "epoch":
            signal.raise_signal(number)
    assert records[-1].kind == "stopped"
    assert records[-1].epoch <= 4
    assert (tmp_path / "checkpoint.pt").exists()
    assert (tmp_path / "nep_best.txt").exists()
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("start", ["file", "checkpoint"])
def test_fine_tuning_starts_where_the_model_is(tmp_path: Path, start: str) -> None:
    sizes = {"cutoff": ((4.0, 3.0), (5.0, 4.0), (4.5, 3.5)), "n_max": (2, 2), "basis_size": (3, 3), "hidden": (4,)}
    given = make_model(("C", "Ge", "Si"), **sizes)
    frames = trainings.frames(6, model=given)
    path = tmp_path / "nep.txt"
    nep_txt.write(given, path)
    if start == "checkpoint":
        train(trainings.settings(epochs=0), frames, device="cpu", start=path, directory=tmp_path)
        path = tmp_path / "checkpoint.pt"
    training = Training(trainings.settings(epochs=1, lr=1e-9, stop_lr=0.0), frames, device="cpu", start=path)
    assert training.settings.elements == ("C", "Si")
    if start == "file":
        assert training.messages == ["elements that no frame has were removed from the model: Ge"]
    (record, _) = run(training)
    assert record.train.force == pytest.approx(0.0, abs=1e-5)
    assert record.train.energy == pytest.approx(0.0, abs=1e-5)
    kept = Training(trainings.settings(), frames, device="cpu", start=given, keep_types=True)
    assert kept.settings.elements == ("C", "Ge", "Si")
    with pytest.raises(NepError, match="element C is not in the model"):
        Training(trainings.settings(), frames, device="cpu", start=make_model(("Si",)))


@pytest.mark.parametrize("scheduler", ["plateau", "step", "cosine"])
def test_learning_rates_fall_to_the_smallest(scheduler: str) -> None:
    settings = trainings.settings(
        epochs=12, lr_scheduler=scheduler, lr=1e-3, stop_lr=1e-4, scheduler_patience=1, scheduler_factor=0.3,
        stage2=True, start_stage2=9, stage2_lr=5e-4, stage2_scheduler="step", stage2_scheduler_step=2,
    )  # fmt: skip
    rates = [r.lr for r in run(Training(settings, trainings.frames(3), device="cpu")) if r.kind == "epoch"]
    one, two = rates[:8], rates[8:]
    assert one[0] == 1e-3
    assert min(one) >= 1e-4
    assert one == sorted(one, reverse=True)
    if scheduler != "plateau":
        assert one[-1] < 2.1e-4
    np.testing.assert_allclose(two, [5e-4, 5e-4, 1.5e-4, 1.5e-4])


def test_a_stage_ends_early_when_nothing_gets_better() -> None:
    settings = trainings.settings(
        epochs=40, early_stop=3, lr=1e-30, weight_decay=0.0, stop_lr=0.0, batch=6, stage2=True
    )
    frames = trainings.frames(6)
    records = [r for r in run(Training(settings, frames, frames, device="cpu")) if r.kind == "epoch"]
    assert sum(r.stage == 1 for r in records) < 20
    assert sum(r.stage == 2 for r in records) >= 1


@pytest.mark.parametrize("batch", [1, 3, 6, 100])
@pytest.mark.parametrize("count", [1, 7])
def test_every_frame_is_in_one_batch_of_an_epoch(count: int, batch: int) -> None:
    plan = Plan.of(np.arange(count, dtype=float), batch, seed=5)
    for size in (1, 2, 3):
        seen = []
        for frames in plan.epoch(0):
            assert (frames >= 0).sum() <= batch
            shares = [plan.share(frames, rank, size) for rank in range(size)]
            assert sorted(np.concatenate(shares)) == sorted(frames[frames >= 0])
            seen += [int(i) for share in shares for i in share]
        assert sorted(seen) == list(range(count))
        owned = [plan.owned(rank, size) for rank in range(size)]
        assert sorted(np.concatenate(owned)) == list(range(count))
    if count > batch > 1:
        assert [list(b) for b in plan.epoch(0)] != [list(b) for b in plan.epoch(1)]


def test_processes_have_even_work() -> None:
    work = np.random.default_rng(0).lognormal(0, 1.0, 640)
    plan = Plan.of(work, 32, seed=1)
    for size in (2, 4):
        shares = np.array([[work[plan.share(b, r, size)].sum() for r in range(size)] for b in plan.epoch(3)])
        assert (shares.max(axis=1) / shares.mean(axis=1)).mean() < 1.25
        assert (shares.sum(axis=0) / shares.sum()).max() < 1.05 / size


def test_splits_are_the_same_for_the_same_seed() -> None:
    frames = trainings.frames(10, sizes=(3,))
    one, two = split(frames, 0.3, 7), split(frames, 0.3, 7)
    assert [list(x) for x in one] == [list(x) for x in two]
    assert sorted([*one[0], *one[1]]) == list(range(10))
    assert len(one[1]) == 3
    assert list(split(frames, 0.3, 8)[1]) != list(one[1])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"elements": ("Si", "Xx")}, "symbols from H to Pu"),
        ({"cutoff": ((4.0, 5.0),)}, "angular ≤ radial"),
        ({"lr": 0.0}, "above 0"),
        ({"loss": "l1"}, "mse or rmse"),
        ({"type_weight": (1.0,)}, "2 numbers"),
        ({"lambda_e": 0.0, "lambda_f": 0.0, "lambda_v": 0.0}, "nothing to train on"),
        ({"zbl_factor": 0.7}, "zbl as well"),
    ],
)
def test_settings_that_make_no_sense(change: dict[str, Any], reason: str) -> None:
    values = {"elements": trainings.ELEMENTS} | change
    with pytest.raises(SettingsError, match=reason):
        Settings(**values)


def test_settings_survive_json() -> None:
    settings = trainings.settings(**STAGES, zbl_pairs=((1.0, 2.0) + (0.1,) * 8,) * 3, type_weight=(1.0, 2.0))
    assert Settings.from_dict(json.loads(json.dumps(settings.as_dict()))) == settings
    with pytest.raises(SettingsError, match="no such setting"):
        Settings.from_dict({"elements": ["Si"], "learning": 1})


def test_frames_that_cannot_be_computed_are_named() -> None:
    frames = trainings.frames(4)
    positions = frames.structures.positions.copy()
    a = int(frames.structures.offsets[2])
    positions[a] = positions[a + 1]
    bad = replace(frames, structures=replace(frames.structures, positions=positions))
    with pytest.raises(InputFileError, match=r"made\.xyz, frame 3, line \d+: positions: atoms 1 and 2 coincide"):
        Training(trainings.settings(), bad, device="cpu")
    with pytest.raises(InputFileError, match=r"frame 2.*element C"):
        Training(replace(trainings.settings(), elements=("Ge", "Si")), frames, device="cpu")
    with pytest.raises(ModelError, match="no backend 'fast'"):
        Training(trainings.settings(), frames, device="cpu", backend="fast")


def test_a_wild_learning_rate_is_no_training(tmp_path: Path) -> None:
    """The first step is finite, what it leads to is not: back to the start, and again, and then the end."""
    training = Training(trainings.settings(epochs=30, lr=1e30, dtype="float32"), trainings.frames(5), device="cpu")
    said: list[str] = []
    with pytest.raises(TrainingError, match="smaller lr"):
        said.extend(message for record in training.run() for message in record.messages)
