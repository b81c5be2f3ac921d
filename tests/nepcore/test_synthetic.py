"""Synthetic models: the same file from a seed, well scaled, and of every shape."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from nepcore import synthetic
from nepcore.files import nep_txt
from nepcore.files.nep_layout import SWITCHES
from nepcore.synthetic import demo_model, make_model

if TYPE_CHECKING:
    from pathlib import Path


def test_same_seed_same_file() -> None:
    once = nep_txt.dumps(make_model(["Si", "C"], zbl="flexible", seed=5))
    assert nep_txt.dumps(make_model(["Si", "C"], zbl="flexible", seed=5)) == once
    assert nep_txt.dumps(make_model(["Si", "C"], zbl="flexible", seed=6)) != once


def test_random_stream_is_the_guaranteed_one() -> None:
    # numpy guarantees the bits of PCG64 for good, not what its distributions make of them.
    (w,) = make_model(["H"], n_max=(0, 0), basis_size=(0, 0), l_max=1, switches=(), hidden=(1,)).c_radial.reshape(-1)
    raw = int(np.random.PCG64(0).random_raw())
    assert w == float(f"{((raw >> 11) * 2.0**-53 * 2.0 - 1.0) * 3.0**0.5:.7e}")


@pytest.mark.parametrize("version", [3, 4, 5])
@pytest.mark.parametrize("zbl", ["none", "universal", "typewise", "flexible"])
@pytest.mark.parametrize("hidden", [(7,), (5, 3)], ids=["one-layer", "two-layers"])
def test_every_kind_is_written_and_read(version: int, zbl: str, hidden: tuple[int, ...]) -> None:
    for temperature in (False, True) if version != 5 else (False,):
        model = make_model(["O", "H"], version=version, zbl=zbl, hidden=hidden, temperature=temperature)
        assert (model.version, model.zbl, model.hidden, model.temperature) == (version, zbl, hidden, temperature)
        text = nep_txt.dumps(model)
        assert nep_txt.loads(text).equals(model)
        assert all(len(line) == 15 for line in text.splitlines()[model.layout.n_lines :])


def test_arguments_arrive() -> None:
    model = make_model(
        ("Te", "Pb"),
        cutoff=((6, 4), (5, 3)),
        n_max=(3, 2),
        basis_size=(5, 4),
        l_max=3,
        switches={"q112": True, "q222": False},
    )
    assert model.elements == ("Te", "Pb")
    assert model.cutoff_radial.tolist() == [6, 5]
    assert model.cutoff_angular.tolist() == [4, 3]
    assert model.c_radial.shape == (4, 6, 2, 2)
    assert model.c_angular.shape == (3, 5, 2, 2)
    assert [name for name in SWITCHES if model.switches[name]] == ["q112"]
    assert model.dim == 4 + 3 * 4
    thermal = make_model(["Si"], temperature=True)
    assert thermal.q_scaler[-1] == 0.001


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"elements": []}, "cutoff must be a pair"),
        ({"elements": ["Xx"]}, "unknown element"),
        ({"elements": ["Si", "Si"]}, "twice"),
        ({"version": 6}, "version 6"),
        ({"version": 5, "temperature": True}, "not known"),
        ({"zbl": "fixed"}, "unknown kind of ZBL"),
        ({"switches": ("q333",)}, "unknown switches"),
        ({"l_max": 9}, "l_max must be 1 to 8"),
        ({"l_max": 0}, "l_max must be 1 to 8"),
        ({"hidden": ()}, "one or two layers"),
        ({"hidden": (4, 4, 4)}, "one or two layers"),
        ({"cutoff": (4.0, 5.0)}, "larger than the radial one"),
        ({"cutoff": ((5.0, 4.0), (5.0, 4.0))}, "shape"),
        ({"seed": -1}, "non-negative"),
        ({"n_max": (-2, 0)}, "negative"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_impossible_models_are_refused(changes: dict[str, object], reason: str) -> None:
    arguments = {"elements": ["Si"], **changes}
    with pytest.raises(ValueError, match=reason):
        make_model(arguments.pop("elements"), **arguments)


def test_demo_says_what_it_is() -> None:
    model = demo_model()
    assert model.elements == ("H", "C", "N", "O", "Al", "Si", "Cu")
    assert model.zbl == "universal"
    assert "synthetic" in synthetic.DEMO_NAME
    assert len(nep_txt.dumps(model)) < 100_000


@pytest.mark.parametrize(
    ("elements", "changes"),
    [
        (("Si",), {}),
        (("Si", "C", "O"), {"zbl": "universal"}),
        (("Si", "C"), {"zbl": "flexible", "hidden": (20, 10)}),
        (("Si", "C"), {"version": 5, "zbl": "typewise"}),
        (("Si",), {"l_max": 8, "switches": SWITCHES}),
        (("Si",), {"temperature": True}),
        (("Te", "Pb"), {"version": 3, "cutoff": ((8.0, 4.0), (7.0, 5.0)), "n_max": (8, 6)}),
        (("H", "C", "N", "O", "Al", "Si", "Cu"), {"n_max": (4, 3), "basis_size": (4, 4), "hidden": (10,)}),
    ],
    ids=["plain", "universal", "two-layers", "version-5", "all-switches", "temperature", "version-3", "demo"],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_scale_in_condensed_matter(elements: tuple[str, ...], changes: dict[str, object], seed: int) -> None:
    pytest.importorskip("torch")
    from nepcore.calculator import Calculator
    from nepcore.structures import Structure

    dice = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(*[np.arange(4.0)] * 3, indexing="ij"), axis=-1).reshape(-1, 3) * 2.5
    structure = Structure.make(
        [str(s) for s in dice.choice(elements, len(grid))],
        grid + dice.normal(scale=0.15, size=grid.shape),
        np.eye(3) * 10.0,
        True,
        temperature=300.0 if changes.get("temperature") else None,
    )
    model = make_model(elements, seed=seed, **changes)
    calculator = Calculator.of(model, device="cpu", dtype="float64")
    results = calculator.evaluate([structure], ["energies", "forces", "descriptors"])
    assert not results.errors
    assert 0.05 < np.sqrt((results.values["descriptors"] ** 2).mean()) < 5.0
    assert np.sqrt((results.values["energies"] ** 2).mean()) < 10.0
    assert 0.05 < np.sqrt((results.values["forces"] ** 2).mean()) < 10.0


def test_command_writes_a_model(tmp_path: Path) -> None:
    path = tmp_path / "nep.txt"
    command = [
        sys.executable,
        "-m",
        "nepcore.synthetic",
        "-o",
        str(path),
        "--elements",
        "Si",
        "C",
        "--zbl",
        "universal",
    ]
    command += ["--cutoff", "6", "4", "5", "4", "--switches", "q222", "q1111", "--hidden", "8", "4", "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "physically meaningless" in done.stdout
    wanted = make_model(
        ["Si", "C"], zbl="universal", cutoff=((6, 4), (5, 4)), switches=("q222", "q1111"), hidden=(8, 4), seed=3
    )
    assert nep_txt.read(path).equals(wanted)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--elements", "Si", "--l-max", "9"], "l_max must be 1 to 8"),
        (["--elements", "Si", "--cutoff", "5"], "--cutoff takes 2 numbers"),
        (["--elements", "si"], "case sensitive"),
        (["--elements", "Si", "--switches", "q333"], "unknown switches"),
        (["--elements"], "expected at least one argument"),
    ],
)
def test_command_refuses(arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nep.txt"
    try:
        status = synthetic.main(["-o", str(path), *arguments])
    except SystemExit as end:
        status = end.code
    assert status in {1, 2}
    assert reason in capsys.readouterr().err
    assert not path.exists()


def test_command_names_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert synthetic.main(["-o", str(tmp_path / "absent" / "nep.txt"), "--elements", "Si"]) == 1
    assert "absent" in capsys.readouterr().err


def test_digest_of_a_file() -> None:
    # The file as this project wrote it first (x86-64, numpy 2); a change would alter every test that uses a seed.
    text = nep_txt.dumps(make_model(["Si", "C"], zbl="universal", switches=("q222", "q1111"), seed=1))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "ae429a7268c8de39"
