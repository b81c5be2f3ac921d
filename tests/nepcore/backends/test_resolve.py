"""Which backend evaluates a model: the rule, names, and what is remembered of measurements."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import crystals
from nepcore import ModelError, synthetic
from nepcore.backends import candidates, choices, measure, mulsum, resolve
from nepcore.calculator import Calculator
from nepcore.structures import PROPERTIES

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
MODEL = synthetic.make_model(("Si", "C"), n_max=(2, 2), basis_size=(3, 3), l_max=2, hidden=(5,), seed=1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEPSERVE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("device", "n_types", "compiled", "wanted"),
    [
        *[("cuda", n, True, "mulsum") for n in (1, 19, 20, 32, 33, 89)],
        *[("cuda", n, False, "mulsum") for n in (1, 20, 32)],
        *[("cuda", n, False, "bmm") for n in (33, 89)],
        *[(d, n, c, "loop") for d in ("cpu", "mps") for n in (1, 19) for c in (True, False)],
        *[(d, n, c, "bmm") for d in ("cpu", "mps") for n in (20, 33, 89) for c in (True, False)],
    ],
)
def test_rule(device: str, n_types: int, compiled: bool, wanted: str) -> None:
    assert resolve.by_rule(device, n_types, compiled=compiled) == wanted


@pytest.mark.parametrize(
    ("device", "n_types", "hip", "wanted"),
    [
        *[("cuda", n, None, True) for n in (1, 16, 32)],
        *[("cuda", n, None, False) for n in (33, 89)],
        *[("cuda", n, "6.4.43482", True) for n in (1, 32, 33, 89)],
        *[(d, n, None, False) for d in ("cpu", "mps") for n in (1, 32, 33)],
    ],
)
def test_form_of_mulsum(
    device: str, n_types: int, hip: str | None, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    assert mulsum.takes_one_hot(device, n_types) is wanted


def test_names() -> None:
    assert set(candidates.names()) >= {"loop", "bmm", "mulsum", "density", "density+compiled", "fused-cpu"}
    assert Calculator.of(MODEL, device="cpu", backend="density").choice == {"how": "asked", "backend": "density"}
    assert Calculator.of(MODEL, device="cpu", backend="rule").choice == {"how": "rule", "backend": "loop"}
    with pytest.raises(ModelError, match=r"no backend 'fast'; there are: auto, rule, loop"):
        Calculator.of(MODEL, device="cpu", backend="fast")


def report_of(small: str, large: str) -> measure.Report:
    timing = measure.Timing("one: 1 × 32 atoms", 1.5, 46.875, None, 0.01)
    return measure.Report({"small": small, "large": large}, [measure.Row(small, [timing], 0.1, "chosen")], 2.0, True)


def test_what_was_measured_is_remembered_and_shared_by_fine_tunes() -> None:
    key = choices.key_of(MODEL, CPU, "float32")
    assert choices.read(key) is None
    assert choices.write(key, report_of("density", "mulsum"))
    tuned = synthetic.make_model(MODEL.elements, n_max=(2, 2), basis_size=(3, 3), l_max=2, hidden=(5,), seed=2)
    calculator = Calculator.of(tuned, device="cpu")
    assert calculator.choice["how"] == "cached"
    assert calculator.backend == "density (small), mulsum (large)"
    assert calculator.choice["rows"] == [
        {
            "name": "density",
            "timings": [
                {"batch": "one: 1 × 32 atoms", "milliseconds": 1.5, "microseconds_per_atom": 46.875, "error": 0.01}
            ],
            "prepared": 0.1,
            "verdict": "chosen",
        }
    ]
    assert Calculator.of(tuned, device="cpu", backend="rule").choice["how"] == "rule"
    assert Calculator.of(tuned, device="cpu", dtype="float64").choice["how"] == "unmeasured"
    other = synthetic.make_model(MODEL.elements, n_max=(3, 2), basis_size=(3, 3), l_max=2, hidden=(5,), seed=2)
    assert Calculator.of(other, device="cpu").choice["how"] == "unmeasured"


@pytest.mark.parametrize(
    "poison",
    [
        b"",
        b"\x00\xff\xfe",
        b"[]",
        b"null",
        b'{"key": 1}',
        b"[" * 100_000,
        b"{}" + b" " * 2_000_000,
        "foreign",
        "unknown backend",
        "half a choice",
        "wrong types",
    ],
    ids=str,
)
def test_a_poisoned_cache_does_not_stop_a_start(
    poison: bytes | str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = choices.key_of(MODEL, CPU, "float32")
    assert choices.write(key, report_of("density", "density"))
    path = choices.path_of(key)
    assert path is not None
    data = json.loads(path.read_text())
    if poison == "foreign":
        data["key"]["device"]["name"] = "another"
    elif poison == "unknown backend":
        data["report"]["choice"]["large"] = "os.system"
    elif poison == "half a choice":
        del data["report"]["choice"]["large"]
    elif poison == "wrong types":
        data["report"]["rows"] = [{"name": "x", "verdict": "", "timings": [{"no": 1}]}]
    path.write_bytes(poison if isinstance(poison, bytes) else json.dumps(data).encode())
    with caplog.at_level(logging.WARNING, logger="nepcore"):
        calculator = Calculator.of(MODEL, device="cpu", backend="auto")
    assert calculator.choice["how"] == "unmeasured"
    assert len(caplog.records) == (0 if poison == "half a choice" else 1)
    assert np.isfinite(calculator.evaluate(crystals.random_structure(1, MODEL.elements))["energy"]).all()


def test_a_cache_that_cannot_be_written(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.write_text("a file where the folder should be")
    key = choices.key_of(MODEL, CPU, "float32")
    with caplog.at_level(logging.WARNING, logger="nepcore"):
        assert not choices.write(key, report_of("loop", "loop"))
        assert choices.read(key) is None
    assert "not kept" in caplog.text


def test_limits_are_kept_by_backend(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Calculator.of(MODEL, device="cpu", backend="loop")
    assert loop.learned_limit() is None
    loop.keep_limit(4096)
    assert Calculator.of(MODEL, device="cpu", backend="loop").learned_limit() == 4096
    assert Calculator.of(MODEL, device="cpu", backend="bmm").learned_limit() is None
    loop.keep_limit(None)
    assert loop.learned_limit() is None
    (path,) = cache.glob("limit-*.json")
    for poison in ("-3", "1.5", '"many"', "true"):
        path.write_text(path.read_text().replace('"atoms": null', f'"atoms": {poison}'))
        with caplog.at_level(logging.ERROR, logger="nepcore"):
            assert loop.learned_limit() is None
        loop.keep_limit(None)


def test_no_folder_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEPSERVE_CACHE_DIR", "")
    key = choices.key_of(MODEL, CPU, "float32")
    assert not choices.write(key, report_of("loop", "loop"))
    assert choices.read(key) is None


def test_a_structure_keeps_its_backend_and_its_bits_in_any_company() -> None:
    choices.write(choices.key_of(MODEL, CPU, "float32"), report_of("bmm", "density"))
    calculator = Calculator.of(MODEL, device="cpu")
    small = [crystals.random_structure(k, MODEL.elements, n=5 + k) for k in range(3)]
    large = crystals.diamond((5, 5, 6))
    assert len(large) > measure.CLASSES["small"]
    together = calculator.evaluate([small[0], large, small[1], small[2]], PROPERTIES)
    for i, s, backend in ((0, small[0], "bmm"), (1, large, "density"), (3, small[2], "bmm")):
        alone = Calculator.of(MODEL, device="cpu", backend=backend).evaluate(s, PROPERTIES).view(0)
        for name, value in alone.values.items():
            assert np.array_equal(value, together.view(i)[name]), (i, name)
    assert len(calculator.evaluate([])) == 0
