"""From ``nep.in`` and data to settings; what is found in data before a training."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

import trainings
from nepcore.errors import InputFileError
from nepcore.files import nep_in, xyz
from nepcore.training import SettingsError, inputs, survey

if TYPE_CHECKING:
    from pathlib import Path

FRAME = """2
Lattice="0 2.715 2.715 2.715 0 2.715 2.715 2.715 0" Properties=species:S:1:pos:R:3:forces:R:3 energy=-0.5{more}
Si 0.05 -0.03 0.02 0.1 0.0 0.0
Si 1.57 1.25 1.19 -0.1 0.0 0.0
"""


def text(*more: str) -> str:
    return "".join(FRAME.format(more=f" {m}" if m else "") for m in more)


def test_a_file_of_gpumd_keeps_its_meaning() -> None:
    found = inputs.inputs(
        nep_in.loads("type 2 Si C\nlambda_e 2\nlambda_v 0.3\ngeneration 50000\nbatch 1000\noutput_interval 500\n"
                     "save_potential 10000 0 1\nl_max 4 2 1\nneuron 10 5\ncutoff 6 4 5 3"), 100,
    )  # fmt: skip
    s = found.settings
    assert (s.loss, s.lambdas) == ("rmse", (2.0, 1.0, 0.3))
    assert (s.epochs, s.batch, s.output_interval, s.save_potential) == (300, 8, 3, 60)
    assert (s.switches, s.neuron, s.cutoff) == (("q222", "q1111"), (10, 5), ((6.0, 4.0), (5.0, 3.0)))
    assert any("batch 1000" in m for m in found.messages)
    assert any("GPUMD's form" in m for m in found.messages)


def test_keywords_of_gradients() -> None:
    found = inputs.inputs(
        nep_in.loads("type 1 Si\nepoch 20\nbatch 64\nlr 3e-3\nstart_stage2 11\nstage2_lambda_e 2\nearly_stop 5 7\n"
                     "lr_scheduler cosine\nsave_potential 4\nstage2_lr_scheduler step\nversion 5\nseed 9"), 100,
    )  # fmt: skip
    s = found.settings
    assert (s.loss, s.batch, s.epochs, s.save_potential, s.seed, s.offset) == ("mse", 64, 20, 4, 9, "elements")
    one, two = s.stages()
    assert (one.epochs, one.lr, one.lr_scheduler, one.early_stop) == (10, 3e-3, "cosine", 5)
    assert (two.epochs, two.lambda_e, two.lr_scheduler, two.early_stop) == (10, 2.0, "step", 7)
    assert found.messages == ()


def test_every_keyword_that_is_one_setting_is_a_keyword_and_a_setting() -> None:
    from nepcore.files.nep_keywords import KEYWORDS
    from nepcore.training import Settings

    assert set(inputs._NAMES) <= set(KEYWORDS)
    assert set(inputs._NAMES.values()) <= set(Settings.__dataclass_fields__)


def test_what_is_given_precedes_the_file_and_faults_name_their_place() -> None:
    found = nep_in.loads("type 1 Si\nepoch 20\nlambda_e 0\nlambda_f 0\nlambda_v 0")
    assert inputs.inputs(found, 10, epochs=3, lambda_f=1.0, seed=None).settings.epochs == 3
    with pytest.raises(InputFileError, match=r"line 3: lambda_e: .* all 0"):
        inputs.inputs(found, 10)
    with pytest.raises(SettingsError, match="batch"):
        inputs.inputs(nep_in.loads("type 1 Si"), 10, batch=0)


def test_zbl_in_is_read_where_zbl_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "zbl.in").write_text("0.5 2 " + "1 " * 8)
    (tmp_path / "nep.in").write_text("type 1 Si\nzbl 2")
    settings = inputs.inputs(nep_in.read(tmp_path / "nep.in"), 10).settings
    assert settings.zbl is None
    assert settings.zbl_pairs is not None
    (tmp_path / "nep.in").write_text("type 1 Si")
    assert inputs.inputs(nep_in.read(tmp_path / "nep.in"), 10).settings.zbl_pairs is None


@pytest.mark.parametrize(("frames", "batch"), [(1, 1), (15, 1), (25, 2), (100, 8), (308, 32), (100_000, 32)])
def test_batches_of_few_frames_are_small(frames: int, batch: int) -> None:
    assert inputs.batch_of(frames) == batch


def test_what_is_proposed_can_be_trained_with() -> None:
    frames = trainings.frames(20)
    found = survey.look(frames)
    proposed = inputs.propose(found, ("Si", "C"))
    read = nep_in.loads(proposed)
    assert read.elements == ("Si", "C")
    assert read.warnings == ()
    settings = inputs.inputs(read, len(frames)).settings
    assert settings.stage2
    assert settings.batch == 2


def test_cutoffs_follow_the_density() -> None:
    thin, thick = np.linspace(0, 20, 81) ** 1, np.linspace(0, 8, 81) ** 3 * 0.5
    assert inputs.cutoffs(thin) == (8.0, 5.0)
    radial, angular = inputs.cutoffs(thick)
    assert 4.5 <= radial < 8.0
    assert 3.0 <= angular <= 4.0


def test_what_is_found_in_data() -> None:
    frames = trainings.without(trainings.frames(7), virial=[0, 3], forces=[2], energy=[6])
    found = survey.look(frames)
    assert (found.frames, found.atoms) == (7, int(frames.structures.counts.sum()))
    assert found.without == {"energy": 1, "forces": 1, "virial": 2}
    assert found.largest_force is not None
    assert found.largest_force[0] == pytest.approx(np.nanmax(np.linalg.norm(frames.forces, axis=1)))
    assert found.duplicates == ()
    assert found.shortest is not None
    rows = dict(found.rows())
    assert rows["labels"] == "1 of 7 without energy, 1 of 7 without forces, 2 of 7 without virial"
    assert sum(n for n, _ in found.types.values()) == found.atoms


def test_shortest_distance_and_neighbours_are_those_of_a_crystal() -> None:
    found = survey.look(xyz.parse(text("", "")))
    cell = 2.715 * (np.ones((3, 3)) - np.eye(3))
    images = np.array([[a, b, c] for a in (-1, 0, 1) for b in (-1, 0, 1) for c in (-1, 0, 1)]) @ cell
    assert found.shortest == pytest.approx(np.linalg.norm(images + np.array([1.52, 1.28, 1.17]), axis=1).min())
    # A face-centred cell of two atoms and 40.03 Å³.
    assert found.within(8.0) == pytest.approx(2 / 40.03 * 4 / 3 * np.pi * 8**3, rel=0.06)


def test_duplicates_are_found_and_those_that_contradict_are_named() -> None:
    frames = xyz.parse(text("", "") + text("").replace("-0.5", "-0.7"), "some.xyz")
    found = survey.look(frames)
    assert found.duplicates == ((1, 0), (2, 0))
    assert any("frame 3 (line 9) is frame 1 (line 1) again, with other labels" in w for w in found.warnings)


def test_absolute_energies_are_reported() -> None:
    frames = trainings.frames(4)
    shifted = replace(frames, energy=frames.energy - 2000.0 * frames.structures.counts)
    assert any("offset of that size" in w for w in survey.look(shifted).warnings)
    assert not any("offset of that size" in w for w in survey.look(frames).warnings)


def test_frames_without_any_neighbour() -> None:
    alone = '1\nLattice="30 0 0 0 30 0 0 0 30" Properties=species:S:1:pos:R:3 energy=-1\nSi 0 0 0\n'
    found = survey.look(xyz.parse(alone))
    assert found.shortest is None
    assert found.within(8.0) == 0.0
    assert dict(found.rows())["forces"] == "none"


VIRIAL = 'virial="1 0 0 0 1 0 0 0 1"'


def test_a_stress_that_contradicts_the_virial_is_refused() -> None:
    good = xyz.parse(text(VIRIAL + ' stress="-0.02498 0 0 0 -0.02498 0 0 0 -0.02498"'))
    survey.check(good)
    bad = xyz.parse(text("", VIRIAL + ' stress="0.02498 0 0 0 0.02498 0 0 0 0.02498"'), "bad.xyz")
    with pytest.raises(InputFileError, match=r"bad\.xyz, frame 2, line 6: virial and -V stress differ") as caught:
        survey.check(bad)
    assert caught.value.frame == 1
    assert caught.value.line == 6


def test_bad_frames_are_named_or_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "train.xyz"
    path.write_text(text("", "", "").replace("Si 1.57 1.25 1.19 -0.1", "Si 1.57 1.25 nan -0.1", 1))
    with pytest.raises(InputFileError, match="frame 1, line 4"):
        survey.read(path)
    frames, skipped = survey.read(path, skip_bad=True)
    assert len(frames) == 2
    assert [(e.frame, e.line) for e in skipped] == [(0, 4)]
    found = survey.look(frames, skipped)
    assert dict(found.rows())["frames"] == "2 (1 left out)"
    assert found.duplicates == ((1, 0),)
    path.write_text("")
    with pytest.raises(InputFileError, match="no frames to train on"):
        survey.read(path)
