"""``nepserve predict`` that is cut off and gone on with, and one that several servers or devices share."""

from __future__ import annotations

import gzip
import json
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from nepcore.errors import InputFileError, ModelError
from nepcore.files import nep_txt, xyz
from nepcore.structures import Predictions
from nepcore.synthetic import make_model
from nepserve.client.errors import NepserveError
from nepserve.pipeline import Pipeline
from nepserve.predict import OutputError, ResumeError, predict
from nepserve.resume import state_name
from servers import running, write_model

GPUMD = ("energy_train.out", "force_train.out", "virial_train.out", "stress_train.out")


class Springs:
    """Atoms on springs to the origin; after ``blocks`` blocks it does what ``then`` does. Helium is unknown to it."""

    def __init__(self, blocks=None, then=None):
        self.blocks, self.then, self.seen = blocks, then, 0

    def evaluate(self, structures, properties, progress=None):
        if self.blocks is not None and self.seen >= self.blocks:
            self.then()
        self.seen += 1
        r = structures.positions
        system = np.repeat(np.arange(len(structures)), structures.counts)
        virial = np.zeros((len(structures), 3, 3))
        np.add.at(virial, system, -2.0 * r[:, :, None] * r[:, None, :])
        values = {
            "energy": np.bincount(system, (r**2).sum(axis=1), len(structures)), "energies": (r**2).sum(axis=1),
            "forces": -2.0 * r, "virial": virial, "stress": -virial.reshape(-1, 9)[:, [0, 4, 8, 5, 2, 1]] / 729.0,
        }  # fmt: skip
        from nepcore.errors import StructureError

        errors = {
            i: StructureError("unknown_element", "atom 1: element He is not in the model", field="numbers", atoms=(0,))
            for i in np.unique(system[structures.numbers == 2]).tolist()
        }
        known = structures.pbc.all(axis=1)
        return Predictions(structures.counts, {k: values[k] for k in properties}, known, errors)


def interrupted():
    raise KeyboardInterrupt


def write_frames(path, count, bad=()):
    """Frames of 1 to 3 atoms with labels; those in ``bad`` hold helium, every other of them cannot even be read."""
    rng = np.random.default_rng(5)
    texts = []
    for i in range(count):
        n = 1 + i % 3
        symbol = ("He" if i % 2 else "Xy") if i in bad else "Si"
        rows = "".join("{} {} {} {}\n".format(symbol, *r) for r in rng.uniform(0, 3, (n, 3)).tolist())
        texts.append(f'{n}\nLattice="9 0 0 0 9 0 0 0 9" id={i} energy={i}\n{rows}')
    path.write_text("".join(texts))
    return path


def contents(folder, name):
    return {path: (folder / path).read_bytes() for path in (name, *(f"g/{each}" for each in GPUMD))}


PROGRAM = """
import os, signal, sys
sys.path[:0] = [{tests!r}, {here!r}]
from test_predict_resume import Springs
from nepserve.predict import predict
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
predict("in.xyz", None, {name!r}, calculator=Springs({blocks}, die), max_atoms=30, gpumd_dir="g", skip_bad=True,
        progress=False)
"""


@pytest.mark.parametrize("name", ["out.xyz", "out.xyz.gz"])
@pytest.mark.parametrize("blocks", [0, 1, 7])
def test_a_run_that_was_killed_is_gone_on_with_to_the_same_bytes(tmp_path, monkeypatch, capsys, name, blocks):
    monkeypatch.chdir(tmp_path)
    write_frames(tmp_path / "in.xyz", 60, bad=(3, 12, 47))
    options = {"max_atoms": 30, "gpumd_dir": "g", "skip_bad": True, "progress": False}
    whole = predict("in.xyz", None, name, calculator=Springs(), **options)
    wanted = contents(tmp_path, name)
    for path in wanted:
        (tmp_path / path).unlink()
    here = Path(__file__).parent
    program = PROGRAM.format(tests=str(here.parent), here=str(here), name=name, blocks=blocks)
    done = subprocess.run([sys.executable, "-c", program], check=False, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / name).exists()
    springs = Springs()
    again = predict("in.xyz", None, name, calculator=springs, resume=True, **options)
    assert contents(tmp_path, name) == wanted
    assert ("going on after frame" in capsys.readouterr().err) is (blocks > 0)
    whole_run = Springs()
    predict("in.xyz", None, "other.xyz", calculator=whole_run, max_atoms=30, skip_bad=True, progress=False)
    assert springs.seen == whole_run.seen - blocks, "what was done is not done again"
    for field in ("frames", "atoms", "failed", "failures", "rmse_energy", "warnings"):
        assert getattr(again, field) == getattr(whole, field), field
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["in.xyz", name, "other.xyz", "g"])
    assert sorted(p.name for p in (tmp_path / "g").iterdir()) == sorted(GPUMD)


def test_what_was_written_after_the_last_record_does_not_count(tmp_path):
    path = write_frames(tmp_path / "in.xyz", 40)
    predict(path, None, tmp_path / "whole.xyz", calculator=Springs(), max_atoms=30, progress=False)
    with pytest.raises(KeyboardInterrupt):
        predict(path, None, tmp_path / "o.xyz", calculator=Springs(3, interrupted), max_atoms=30, progress=False)
    with (tmp_path / "o.xyz.partial").open("ab") as file:
        file.write(b"3\nhalf a fra")
    predict(path, None, tmp_path / "o.xyz", calculator=Springs(), max_atoms=30, resume=True, progress=False)
    assert (tmp_path / "o.xyz").read_bytes() == (tmp_path / "whole.xyz").read_bytes()


def test_a_run_is_gone_on_with_several_times(tmp_path):
    path = write_frames(tmp_path / "in.xyz", 40)
    predict(path, None, tmp_path / "whole.xyz", calculator=Springs(), max_atoms=30, progress=False)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            predict(path, None, tmp_path / "o.xyz", calculator=Springs(1, interrupted), max_atoms=30, resume=True,
                    progress=False)  # fmt: skip
    state = json.loads(state_name(tmp_path / "o.xyz").read_text())
    assert state["read"] == len(xyz.read(tmp_path / "o.xyz.partial")) > 0
    predict(path, None, tmp_path / "o.xyz", calculator=Springs(), max_atoms=30, resume=True, progress=False)
    assert (tmp_path / "o.xyz").read_bytes() == (tmp_path / "whole.xyz").read_bytes()


def test_another_run_is_not_gone_on_with(tmp_path):
    path = write_frames(tmp_path / "in.xyz", 40)
    out = tmp_path / "o.xyz"

    def begin():
        with pytest.raises(KeyboardInterrupt):
            predict(path, None, out, calculator=Springs(3, interrupted), max_atoms=30, progress=False)

    def go_on(**more):
        return predict(
            path, None, out, **{"calculator": Springs(), "max_atoms": 30, "resume": True, "progress": False, **more}
        )

    begin()
    for more, name in (
        ({"properties": ["energy"]}, "properties"), ({"skip_bad": True}, "skip_bad"), ({"dtype": "float64"}, "dtype"),
        ({"gpumd_dir": tmp_path / "g"}, "gpumd_out"), ({"max_atoms": 31}, "blocks"),
    ):  # fmt: skip
        with pytest.raises(ResumeError, match=f"was begun with {name} .*without --resume it starts anew"):
            go_on(**more)
    with path.open("a") as file:
        file.write("1\n\nSi 0 0 0\n")
    with pytest.raises(ResumeError, match="input"):
        go_on()
    begin()
    (tmp_path / "o.xyz.partial").write_bytes(b"")
    with pytest.raises(OutputError, match="it has 0 bytes, where"):
        go_on()
    state_name(out).write_text("{}")
    with pytest.raises(ResumeError, match="another version"):
        go_on()
    state_name(out).write_text("half")
    with pytest.raises(ResumeError, match="not the state of a run"):
        go_on()
    with pytest.raises(ResumeError, match="from a file to a file"):
        predict(path, None, "-", calculator=Springs(), resume=True, progress=False)


def test_a_new_run_forgets_what_an_earlier_one_left(tmp_path):
    path = write_frames(tmp_path / "in.xyz", 40)
    out = tmp_path / "o.xyz"
    for blocks in (3, 0):
        with pytest.raises(KeyboardInterrupt):
            predict(path, None, out, calculator=Springs(blocks, interrupted), max_atoms=30, progress=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.xyz"]


def test_packed_output_can_be_read_by_others(tmp_path):
    path = write_frames(tmp_path / "in.xyz", 40)
    predict(path, None, tmp_path / "o.xyz", calculator=Springs(), max_atoms=30, progress=False)
    predict(path, None, tmp_path / "o.xyz.gz", calculator=Springs(), max_atoms=30, progress=False)
    assert gzip.decompress((tmp_path / "o.xyz.gz").read_bytes()) == (tmp_path / "o.xyz").read_bytes()
    path = write_frames(tmp_path / "he.xyz", 1, bad=(0,))
    predict(path, None, tmp_path / "n.xyz.gz", calculator=Springs(), skip_bad=True, progress=False)
    assert gzip.decompress((tmp_path / "n.xyz.gz").read_bytes()) == b""


def test_a_pipeline_keeps_order_and_hands_out_what_came_before_an_error():
    random.seed(3)
    under_way, most = 0, 0
    lock = threading.Lock()

    def work(item, progress):
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        time.sleep(random.random() * 0.02)
        progress(1)
        with lock:
            under_way -= 1
        if item == 11:
            raise ZeroDivisionError
        return item * item

    def items(last, error):
        yield from range(last)
        raise error

    heard = []
    pipeline = Pipeline(work, 4)
    assert list(pipeline.run(range(10), heard.append)) == [(i, i * i) for i in range(10)]
    assert most == 4
    assert max(heard) <= 4
    assert pipeline.seconds > 0
    for source, error, count in (
        (items(5, InputFileError("f", 5, 1, "no")), InputFileError, 5),
        (range(20), ZeroDivisionError, 11),
    ):
        run = Pipeline(work, 4).run(source, heard.append)
        assert [next(run) for _ in range(count)] == [(i, i * i) for i in range(count)]
        with pytest.raises(error):
            next(run)


def crystals(path, count, *, seed=3):
    """Frames of 8 to 40 atoms in a cell, spread over what a small model can evaluate."""
    rng = np.random.default_rng(seed)
    texts = []
    for i in range(count):
        n = int(rng.integers(8, 40))
        grid = np.array([(x, y, z) for x in range(4) for y in range(4) for z in range(4)])[rng.permutation(64)[:n]]
        rows = "".join("Si {!r} {!r} {!r}\n".format(*r) for r in (2.2 * grid + rng.normal(0, 0.1, grid.shape)).tolist())
        texts.append(f'{n}\nLattice="8.8 0 0 0 8.8 0 0 0 8.8" id={i}\n{rows}')
    path.write_text("".join(texts))
    return path


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_several_devices_write_what_one_writes(tmp_path, dtype):
    pytest.importorskip("torch")
    model = tmp_path / "nep.txt"
    nep_txt.write(make_model(("Si",), cutoff=(4.0, 3.0), n_max=(2, 2), basis_size=(3, 3), hidden=(5,)), model)
    path = crystals(tmp_path / "in.xyz", 120)
    options = {"dtype": dtype, "backend": "rule", "max_atoms": 300, "progress": False}
    predict(path, model, tmp_path / "one.xyz", device="cpu", **options)
    predict(path, model, tmp_path / "two.xyz", devices="cpu:2", **options)
    assert (tmp_path / "two.xyz").read_bytes() == (tmp_path / "one.xyz").read_bytes()
    with pytest.raises(ModelError, match="give either"):
        predict(path, model, tmp_path / "o.xyz", device="cpu", devices="cpu:2", progress=False)
    with pytest.raises(ModelError, match="wanted all, numbers of GPUs"):
        predict(path, model, tmp_path / "o.xyz", devices="many", progress=False)


def test_engines_that_do_not_start_say_why(tmp_path):
    pytest.importorskip("torch")
    path = crystals(tmp_path / "in.xyz", 2)
    (tmp_path / "nep.txt").write_text("no model\n")
    with pytest.raises(ModelError, match=r"nep\.txt"):
        predict(path, tmp_path / "nep.txt", tmp_path / "o.xyz", devices="cpu:2", progress=False)


def test_a_server_that_dies_loses_nothing_and_changes_nothing(tmp_path):
    model = write_model(tmp_path / "nep.txt", "Si")
    path = crystals(tmp_path / "in.xyz", 200)
    served = {"models": [str(model)], "stand_in": {"seconds": 0.05}}
    with running(**served) as one, running(**served) as other:
        predict(path, None, tmp_path / "one.xyz", url=one.ready().url, max_atoms=200, progress=False)
        urls = [one.url, other.ready().url]
        killed = []

        def kill():
            # Only once it has something under way.
            end = time.monotonic() + 20
            while time.monotonic() < end:
                if state_name(tmp_path / "two.xyz").exists():
                    other.process.kill()
                    killed.append(json.loads(state_name(tmp_path / "two.xyz").read_text())["read"])
                    return
                time.sleep(0.005)

        thread = threading.Thread(target=kill)
        thread.start()
        result = predict(path, None, tmp_path / "two.xyz", url=urls, max_atoms=200, progress=False)
        thread.join()
        assert killed
        assert killed[0] < 200, "it died too late to be missed"
        assert (result.frames, result.failed) == (200, 0)
        assert (tmp_path / "two.xyz").read_bytes() == (tmp_path / "one.xyz").read_bytes()


def test_all_servers_gone_is_an_error_and_can_be_gone_on_with(tmp_path):
    model = write_model(tmp_path / "nep.txt", "Si")
    path = crystals(tmp_path / "in.xyz", 200)
    served = {"models": [str(model)], "stand_in": {"seconds": 0.05}}
    out = tmp_path / "o.xyz"
    with running(**served) as one:
        predict(path, None, tmp_path / "whole.xyz", url=one.ready().url, max_atoms=200, progress=False)

        def kill():
            while not state_name(out).exists():
                time.sleep(0.005)
            one.process.kill()

        threading.Thread(target=kill, daemon=True).start()
        with pytest.raises(NepserveError):
            predict(path, None, out, url=one.url, max_atoms=200, progress=False)
    assert not out.exists()
    with running(**served) as another:
        result = predict(path, None, out, url=another.ready().url, max_atoms=200, resume=True, progress=False)
    assert result.frames == 200
    assert out.read_bytes() == (tmp_path / "whole.xyz").read_bytes()


def test_a_bad_frame_is_named_whatever_is_under_way(tmp_path):
    model = write_model(tmp_path / "nep.txt", "Si")
    path = crystals(tmp_path / "in.xyz", 60)
    texts = path.read_text().split("\n")
    starts = [i for i, line in enumerate(texts) if line.isdigit()]
    texts[starts[40] + 2] = texts[starts[40] + 2].replace("Si", "He")
    path.write_text("\n".join(texts))
    with running(models=[str(model)]) as one, running(models=[str(model)]) as other:
        urls = [one.ready().url, other.ready().url]
        with pytest.raises(InputFileError) as caught:
            predict(path, None, tmp_path / "o.xyz", url=urls, max_atoms=100, progress=False)
    assert (caught.value.frame, caught.value.line) == (40, starts[40] + 1)
    frames = xyz.read(tmp_path / "o.xyz.partial")
    assert frames.key_numbers("id", 1)[:, 0].tolist() == list(range(40))


def test_the_command_hands_on_what_it_is_told(tmp_path, monkeypatch, capsys):
    from nepserve.cli import main

    told = {}

    def stand_in(source, model, output, **options):
        told.update(options)
        raise ResumeError("the run was begun with other properties")

    monkeypatch.setattr("nepserve.predict.predict", stand_in)
    urls = ["--url", "http://a:1", "--url", "http://b:2,http://c:3"]
    with pytest.raises(SystemExit) as ended:
        main(["predict", "in.xyz", "-o", "o.xyz", *urls, "--resume"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "nepserve: the run was begun with other properties\n"
    assert (told["url"], told["resume"], told["devices"]) == ("http://a:1,http://b:2,http://c:3", True, None)
    with pytest.raises(SystemExit):
        main(["predict", "in.xyz", "-o", "o.xyz", "--url", "http://a:1", "--url", "nonsense"])
    assert "nonsense" in capsys.readouterr().err
