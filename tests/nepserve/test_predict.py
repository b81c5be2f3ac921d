"""``nepserve predict``: files through an evaluator, in order, whole or not at all."""

from __future__ import annotations

import errno
import gzip
import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import create_autospec

import numpy as np
import pytest

import nepserve.client
from nepcore.errors import InputFileError, ModelError, ModelFileError, StructureError
from nepcore.files import xyz
from nepcore.structures import Predictions, Structures
from nepserve.partial_file import OutputError, PartialFile
from nepserve.predict import predict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Springs:
    """Every atom on a spring to the origin, E = Σ |r|²: no neighbours, but every property, and each atom its own.

    Structures with a helium atom cannot be evaluated.
    """

    def __init__(self, interrupt_at: float | None = None) -> None:
        self.blocks: list[int] = []
        self.interrupt_at = interrupt_at

    def evaluate(
        self, structures: Structures, properties: Iterable[str], progress: Callable[[int], None] | None = None
    ) -> Predictions:
        self.blocks.append(structures.n_atoms)
        r = structures.positions
        if self.interrupt_at is not None and (r[:, 0] >= self.interrupt_at).any():
            raise KeyboardInterrupt
        system = np.repeat(np.arange(len(structures)), structures.counts)
        energies = (r**2).sum(axis=1)
        virials = -2.0 * r[:, :, None] * r[:, None, :]
        virial = np.zeros((len(structures), 3, 3))
        np.add.at(virial, system, virials)
        with np.errstate(divide="ignore", invalid="ignore"):
            sigma = -virial / structures.volumes[:, None, None]
        known = structures.pbc.all(axis=1)
        values = {
            "energies": energies, "energy": np.bincount(system, energies, len(structures)), "forces": -2.0 * r,
            "virials": virials, "virial": virial, "stress": sigma[:, [0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]],
        }  # fmt: skip
        errors = {
            i: StructureError("unknown_element", "atom 1: element He is not in the model", field="numbers", atoms=(0,))
            for i in np.unique(system[structures.numbers == 2]).tolist()
        }
        for i in errors:
            values["energy"][i] = np.nan
            values["virial"][i] = np.nan
            values["forces"][structures.offsets[i] : structures.offsets[i + 1]] = np.nan
        if progress is not None:
            for done in (0, structures.n_atoms // 2, structures.n_atoms):
                progress(done)
        return Predictions(structures.counts, {k: values[k] for k in properties}, known, errors)


def frame(i: int, symbol: str = "Si", labels: str = "", n: int | None = None) -> str:
    """Frame i: 1 + i % 3 atoms whose x is i."""
    n = 1 + i % 3 if n is None else n
    rows = "".join(f"{symbol} {i} {k} 0\n" for k in range(n))
    return f'{n}\nLattice="9 0 0 0 9 0 0 0 9" id={i} {labels}\n{rows}'


def source(tmp_path: Path, *texts: str) -> Path:
    path = tmp_path / "in.xyz"
    path.write_text("".join(texts))
    return path


def test_frames_come_out_in_order_with_results(tmp_path: Path) -> None:
    path = source(tmp_path, *[frame(i) for i in range(40)])
    springs = Springs()
    result = predict(path, None, tmp_path / "out.xyz", calculator=springs, max_atoms=20, progress=False)
    assert len(springs.blocks) > 5
    assert (result.frames, result.atoms, result.failed) == (40, sum(1 + i % 3 for i in range(40)), 0)
    assert (result.rmse_energy, result.rmse_forces, result.rmse_virial) == (None, None, None)
    frames = xyz.read(tmp_path / "out.xyz")
    given = xyz.read(path)
    np.testing.assert_array_equal(frames.key_numbers("id", 1)[:, 0], np.arange(40))
    np.testing.assert_array_equal(frames.structures.positions, given.structures.positions)
    np.testing.assert_array_equal(frames.forces, -2.0 * given.structures.positions)
    np.testing.assert_array_equal(frames.column("energies", 1)[:, 0], (given.structures.positions**2).sum(axis=1))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.xyz", "out.xyz"]


def test_only_what_is_asked_for_is_written(tmp_path: Path) -> None:
    path = source(tmp_path, frame(1, labels="energy=3"))
    predict(path, None, tmp_path / "o.xyz", properties=["energy"], calculator=Springs(), progress=False,
            gpumd_dir=tmp_path / "g")  # fmt: skip
    text = (tmp_path / "o.xyz").read_text()
    assert "forces" not in text
    assert "virial" not in text
    assert "energy=3 " not in text
    assert np.loadtxt(tmp_path / "g" / "force_train.out").shape == (2, 6)


def test_errors_against_the_labels(tmp_path: Path) -> None:
    # Frame 2 has three atoms at (2, k, 0): E = 4·3 + 0 + 1 + 4 = 17.
    virial = "-24 -12 0 -12 -10 0 0 0 0"
    rows = "Properties=species:S:1:pos:R:3:forces:R:3"
    labelled = f'3\nenergy=20 virial="{virial}" {rows}\nSi 2 0 0 -4 0 0\nSi 2 1 0 -4 -2 3\nSi 2 2 0 -4 -4 0\n'
    path = source(tmp_path, frame(1), labelled, frame(4, labels=f'virial="{" ".join(["-1e6"] * 9)}"'))
    result = predict(path, None, tmp_path / "o.xyz", calculator=Springs(), progress=False)
    assert result.rmse_energy == pytest.approx(1.0)
    assert result.rmse_forces == pytest.approx(1.0)
    assert result.rmse_virial == pytest.approx(0.0, abs=1e-15)
    assert len(result.warnings) == 1
    assert "frame 3" in result.warnings[0]


@pytest.mark.parametrize(
    ("bad", "line", "reason"),
    [
        (frame(2, "He"), 8, "atom 1: element He is not in the model"),
        (frame(2).replace("Si 2 1 0", "Si 2 nan 0"), 11, "atom 2, pos y: 'nan' is not a finite number"),
        (frame(2, labels="energy="), 9, "key energy: the value is empty"),
    ],
    ids=["element", "position", "label"],
)
def test_a_bad_frame_stops(tmp_path: Path, bad: str, line: int, reason: str, capsys: pytest.CaptureFixture) -> None:
    path = source(tmp_path, frame(0), frame(1), bad, frame(3))
    with pytest.raises(InputFileError) as caught:
        predict(path, None, tmp_path / "out.xyz", calculator=Springs(), gpumd_dir=tmp_path / "g", progress=False)
    assert (caught.value.path, caught.value.frame, caught.value.line) == (str(path), 2, line)
    assert caught.value.reason.startswith(reason)
    assert not (tmp_path / "out.xyz").exists()
    assert not (tmp_path / "g" / "energy_train.out").exists()
    # What was computed is not thrown away, and is not taken for the whole.
    assert xyz.read(tmp_path / "out.xyz.partial").key_numbers("id", 1)[:, 0].tolist() == [0, 1]
    assert len(np.loadtxt(tmp_path / "g" / "energy_train.out.partial")) == 2
    assert "not complete: 2 frames with results are in" in capsys.readouterr().err


@pytest.mark.parametrize("max_atoms", [1, 15, 10_000])
def test_bad_frames_are_skipped_on_request(tmp_path: Path, max_atoms: int) -> None:
    texts = [frame(i, labels=f"energy={i}") for i in range(9)]
    texts[0] = frame(0, "He")
    texts[4] = frame(4, "He", "energy=4")
    texts[5] = texts[5].replace("Si 5 1", "si 5 1")
    texts[8] = frame(8, labels="pbc=maybe")
    path = source(tmp_path, *texts)
    result = predict(path, None, tmp_path / "out.xyz", calculator=Springs(), gpumd_dir=tmp_path / "g", skip_bad=True,
                     max_atoms=max_atoms, progress=False)  # fmt: skip
    assert (result.frames, result.failed) == (5, 4)
    assert [f.frame for f in result.failures] == [0, 4, 5, 8]
    assert "did you mean 'Si'?" in result.failures[2].reason
    frames = xyz.read(tmp_path / "out.xyz")
    good = [1, 2, 3, 6, 7]
    assert frames.key_numbers("id", 1)[:, 0].tolist() == good
    assert frames.key_numbers("source_frame", 1)[:, 0].tolist() == good
    # GPUMD's files keep a row for every frame of the input, in its place.
    energy = np.loadtxt(tmp_path / "g" / "energy_train.out")
    assert np.flatnonzero(np.isfinite(energy[:, 0])).tolist() == good
    assert np.flatnonzero(energy[:, 1] != -1e6).tolist() == [1, 2, 3, 4, 6, 7]
    counts = [1 + i % 3 for i in range(9)]
    forces = np.loadtxt(tmp_path / "g" / "force_train.out")
    np.testing.assert_array_equal(
        forces[:, 0], np.repeat([np.nan, -2, -4, -6, np.nan, np.nan, -12, -14, np.nan], counts)
    )
    assert len(np.loadtxt(tmp_path / "g" / "stress_train.out")) == 9


def test_all_frames_bad(tmp_path: Path) -> None:
    path = source(tmp_path, frame(0, "He"), frame(1, "xx"))
    result = predict(path, None, tmp_path / "o.xyz", calculator=Springs(), skip_bad=True, progress=False)
    assert (result.frames, result.failed) == (0, 2)
    assert (tmp_path / "o.xyz").read_bytes() == b""


def test_interrupted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = source(tmp_path, *[frame(i) for i in range(40)])
    (tmp_path / "out.xyz").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        predict(path, None, tmp_path / "out.xyz", calculator=Springs(interrupt_at=20), max_atoms=1, progress=False)
    assert (tmp_path / "out.xyz").read_text() == "old"
    assert len(xyz.read(tmp_path / "out.xyz.partial")) == 20
    said = capsys.readouterr().err
    assert said == f"not complete: 20 frames with results are in {tmp_path / 'out.xyz.partial'}; --resume goes on\n"


def test_nothing_is_left_of_a_run_without_results(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for text, error in ((frame(0, "He"), InputFileError), ("", InputFileError), ("junk\n", InputFileError)):
        path = source(tmp_path, text)
        with pytest.raises(error):
            predict(path, None, tmp_path / "out.xyz", calculator=Springs(), progress=False)
    with pytest.raises(ModelFileError):
        predict(path, tmp_path / "none.txt", tmp_path / "out.xyz", progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["in.xyz"]
    assert capsys.readouterr().err == ""


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="there are no frames in it"):
        predict(source(tmp_path, "\n"), None, tmp_path / "o.xyz", calculator=Springs(), progress=False)


def test_the_input_is_not_overwritten(tmp_path: Path) -> None:
    path = source(tmp_path, frame(0))
    (tmp_path / "link.xyz").symlink_to(path)
    (tmp_path / "hard.xyz").hardlink_to(path)
    partial = tmp_path / "later.xyz.partial"
    partial.write_text(frame(0))
    for given, output in (
        (path, path), (path, tmp_path / "link.xyz"), (tmp_path / "link.xyz", path), (path, tmp_path / "hard.xyz"),
        (path, tmp_path / "." / "in.xyz"), (partial, tmp_path / "later.xyz"),
    ):  # fmt: skip
        with pytest.raises(OutputError, match="would overwrite"):
            predict(given, None, output, calculator=Springs(), progress=False)
    with pytest.raises(OutputError, match="would overwrite"):
        predict(path, partial, partial, progress=False)
    assert path.read_text() == partial.read_text() == frame(0)


def test_outputs_that_cannot_be_written(tmp_path: Path) -> None:
    path = source(tmp_path, frame(0))
    with pytest.raises(OutputError, match="No such file or directory"):
        predict(path, None, tmp_path / "no" / "out.xyz", calculator=Springs(), progress=False)
    with pytest.raises(OutputError, match="Is a directory"):
        predict(path, None, tmp_path, calculator=Springs(), progress=False)
    with pytest.raises(OutputError, match=r"exists|Not a directory"):
        predict(path, None, tmp_path / "o.xyz", gpumd_dir=path, calculator=Springs(), progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["in.xyz"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No space left"):
        predict(source(tmp_path, frame(0)), None, "/dev/full", calculator=Springs(), progress=False)
    assert not Path("/dev/full").is_file()


class Narrow(io.RawIOBase):
    """A stream that takes little at a time, as the standard output does where Python does not buffer it."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.content = b""

    def write(self, content: Any) -> int:
        taken = bytes(content[: min(7, self.room - len(self.content))])
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.content += taken
        return len(taken)


def test_standard_output_without_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"what was found, to the end\n"
    wide, full = Narrow(100), Narrow(20)
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=wide))
    PartialFile("-").write(text)
    assert wide.content == text
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=full))
    with pytest.raises(OutputError, match="No space left on device"):
        PartialFile("-").write(text)


def test_devices_and_links_stay_what_they_are(tmp_path: Path) -> None:
    path = source(tmp_path, frame(0))
    predict(path, None, os.devnull, calculator=Springs(), progress=False)
    assert not Path(os.devnull).is_file()
    (tmp_path / "far").mkdir()
    link = tmp_path / "link.xyz"
    link.symlink_to(tmp_path / "far" / "real.xyz")
    predict(path, None, link, calculator=Springs(), progress=False)
    assert link.is_symlink()
    assert len(xyz.read(tmp_path / "far" / "real.xyz")) == 1


def test_missing_input(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="No such file"):
        predict(tmp_path / "none.xyz", None, tmp_path / "o.xyz", calculator=Springs())
    with pytest.raises(ModelError, match="unknown property 'speed'"):
        predict(tmp_path / "none.xyz", None, tmp_path / "o.xyz", calculator=Springs(), properties=["speed"])
    with pytest.raises(ModelError, match="no model"):
        predict(tmp_path / "none.xyz", None, tmp_path / "o.xyz")


def test_packed_files(tmp_path: Path) -> None:
    path = tmp_path / "in.xyz.gz"
    path.write_bytes(gzip.compress("".join(frame(i) for i in range(5)).encode()))
    result = predict(path, None, tmp_path / "out.xyz.gz", calculator=Springs(), progress=False)
    assert result.frames == 5
    assert len(xyz.parse(gzip.decompress((tmp_path / "out.xyz.gz").read_bytes()))) == 5


def test_standard_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def tell(self) -> int:
            raise OSError("a pipe has no position")

    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=Pipe(frame(0).encode() + frame(1).encode())))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=out))
    result = predict("-", None, "-", calculator=Springs(), progress=False)
    assert (result.source, result.frames) == ("<stdin>", 2)
    assert len(xyz.parse(out.getvalue())) == 2


def test_progress_in_lines(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nepserve.progress.LINE_EVERY", 0.0)
    path = source(tmp_path, *[frame(i) for i in range(4)])
    predict(path, None, tmp_path / "out.xyz", calculator=Springs())
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"{path}: 0 %, 0 frames, 0 atoms, ")
    assert lines[-1].startswith(f"{path}: 100 %, 4 frames, 7 atoms, ")


def test_progress_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    # Wide enough for the path, however deep the folder of a test lies.
    monkeypatch.setenv("COLUMNS", "400")
    predict(source(tmp_path, frame(0)), None, tmp_path / "out.xyz", calculator=Springs())
    assert "in.xyz" in screen.getvalue()


def test_quiet(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nepserve.progress.LINE_EVERY", 0.0)
    predict(source(tmp_path, frame(0)), None, tmp_path / "out.xyz", calculator=Springs(), progress=False)
    assert capsys.readouterr() == ("", "")


def test_a_model_file(tmp_path: Path) -> None:
    """Through the library, block by block: the same numbers as all at once."""
    nepcore = pytest.importorskip("nepcore.calculator")
    from nepcore.files import nep_txt
    from nepcore.synthetic import make_model

    nep_txt.write(
        make_model(("Si", "Ge"), cutoff=(4.0, 3.0), n_max=(2, 2), basis_size=(3, 3), hidden=(5,)), tmp_path / "m.txt"
    )
    rng = np.random.default_rng(2)
    texts = []
    for _ in range(6):
        n = int(rng.integers(2, 9))
        rows = "".join("Si {} {} {}\n".format(*r) for r in rng.uniform(0, 6, (n, 3)))
        texts.append(f'{n}\nLattice="6 0 0 0 6 0 0 1 6"\n{rows}')
    path = source(tmp_path, *texts)
    result = predict(path, tmp_path / "m.txt", tmp_path / "o.xyz", device="cpu", dtype="float64", max_atoms=10,
                     progress=False)  # fmt: skip
    assert result.frames == 6
    calculator = nepcore.Calculator.load(tmp_path / "m.txt", device="cpu", dtype="float64")
    whole = calculator.evaluate(path, ["energy", "forces", "virial"])
    frames = xyz.read(tmp_path / "o.xyz")
    np.testing.assert_array_equal(frames.energy, whole["energy"])
    np.testing.assert_array_equal(frames.forces, whole["forces"])
    np.testing.assert_array_equal(frames.virial, whole["virial"])


def test_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    springs = Springs()

    def evaluate_many(structures: Structures, properties: Iterable[str], **options: Any) -> Predictions:
        assert options.pop("on_error") == "return"
        options.pop("progress")(len(structures), len(structures))
        assert not options
        return springs.evaluate(structures, properties)

    # A stand-in that takes no call which the client does not take.
    client = create_autospec(nepserve.client.Client)
    client.return_value.evaluate_many.side_effect = evaluate_many
    monkeypatch.setattr(nepserve.client, "Client", client)
    path = source(tmp_path, frame(0), frame(1, "He"), frame(2))
    result = predict(path, "si", tmp_path / "o.xyz", url="http://x:1", api_key="k", skip_bad=True, progress=False)
    assert (result.frames, [f.frame for f in result.failures]) == (2, [1])
    assert client.call_args.args == ("http://x:1",)
    assert client.call_args.kwargs["model"] == "si"
    np.testing.assert_array_equal(xyz.read(tmp_path / "o.xyz").energy, [0, 17])
