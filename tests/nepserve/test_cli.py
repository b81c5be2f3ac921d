"""The command line: one line for an error, exit codes, and what works without the server's packages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import nepcore
from nepserve.cli import main
from nepserve.settings import FIELDS, flag_of
from servers import running, write_model

if TYPE_CHECKING:
    from pathlib import Path

XYZ = "1\nProperties=species:S:1:pos:R:3\nSi 0 0 0\n2\nProperties=species:S:1:pos:R:3\nSi 0 0 0\nSi 0 0 2.3\n"


def run(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nepserve", *words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def without(*packages: str) -> list[str]:
    """A Python that lacks packages, running the command line."""
    program = (
        "import sys\n"
        f"missing = {packages!r}\n"
        "class Gone:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in missing:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Gone())\n"
        "from nepserve.cli import main\n"
        "main()\n"
    )
    return [sys.executable, "-c", program]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "nep.txt", "Si")


@pytest.fixture
def structures(tmp_path: Path) -> Path:
    path = tmp_path / "in.xyz"
    path.write_text(XYZ)
    return path


def one_line(done: subprocess.CompletedProcess[str], code: int) -> str:
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("nepserve: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_version() -> None:
    done = run("version")
    assert (done.returncode, done.stdout) == (0, f"nepserve {nepcore.__version__}\n")


def test_help_names_the_commands() -> None:
    done = run("--help")
    assert done.returncode == 0
    for name in ("serve", "predict", "check", "env", "version"):
        assert name in done.stdout


def test_every_setting_is_a_flag() -> None:
    help_text = run("serve", "--help").stdout
    for name in FIELDS:
        if name != "models":
            assert flag_of(name) in help_text
    assert "--no-insecure" in help_text


def test_flags_reach_the_settings(tmp_path: Path) -> None:
    done = run(
        "serve", "a=x.txt", "y.txt", "--show-config", "--port", "9", "--dtype", "a=float64", "--dtype", "float32",
        "--insecure", "--no-access-log",
    )  # fmt: skip
    assert done.returncode == 0
    lines = {line.partition(" ")[0]: line for line in done.stdout.splitlines()}
    assert 'models = ["a=x.txt", "y.txt"]' in lines["models"]
    assert "port = 9 " in lines["port"]
    assert lines["port"].endswith("# --port")
    assert 'dtype = ["a=float64", "float32"]' in lines["dtype"]
    assert "insecure = true" in lines["insecure"]
    assert lines["access_log"].endswith("# --access-log")
    config = tmp_path / "c.toml"
    config.write_text(done.stdout)
    again = run("serve", "--config", str(config), "--show-config").stdout
    assert [line.partition("#")[0].strip() for line in again.splitlines() if "=" in line] == [
        line.partition("#")[0].strip() for line in done.stdout.splitlines() if "=" in line
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--port", "x"), "--port"),
        (("--config", "/nowhere.toml"), "/nowhere.toml: no such settings file"),
        (("--dtype", "half"), "--dtype"),
        (("/nowhere/nep.txt",), "/nowhere/nep.txt: cannot be read"),
    ],
    ids=str,
)
def test_serve_refuses_in_one_line(words: tuple[str, ...], told: str) -> None:
    assert told in one_line(run("serve", *words), 2)


def test_check(model: Path, tmp_path: Path) -> None:
    done = run("check", str(model))
    assert done.returncode == 0
    assert "Si" in done.stdout
    # A folder stands for the model in it.
    assert run("check", str(model.parent)).stdout == done.stdout
    assert json.loads(run("check", "--json", str(model)).stdout)["model"]["elements"] == ["Si"]
    bad = tmp_path / "bad.txt"
    bad.write_text("nep4 1\n")
    assert f"{bad}, line 1" in one_line(run("check", str(bad)), 1)
    one_line(run("check", str(tmp_path / "nowhere.txt")), 1)
    assert "no nep.txt" in one_line(run("check", str(tmp_path)), 1)


def test_predict(model: Path, structures: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.xyz"
    done = run(
        "predict", str(structures), "-m", str(model.parent), "-o", str(output), "--gpumd-out", str(tmp_path / "g")
    )
    assert done.returncode == 0, done.stderr
    assert "2 frames, 3 atoms" in done.stderr
    assert output.read_text().count(" energy=") == 2
    assert (tmp_path / "g" / "energy_train.out").is_file()
    piped = run("predict", "-", "-m", str(model), "-q", "-p", "energy", stdin=XYZ)
    assert piped.returncode == 0
    assert piped.stderr == ""
    assert piped.stdout.count(" energy=") == 2
    assert "forces" not in piped.stdout


def test_predict_refuses_in_one_line(model: Path, structures: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.xyz"
    bad.write_text(XYZ.replace("Si 0 0 2.3", "U 0 0 2.3"))
    assert "frame 2" in (failed := run("predict", str(bad), "-m", str(model), "-q", "-o", str(tmp_path / "o"))).stderr
    assert "Traceback" not in failed.stderr
    assert failed.returncode == 2
    one_line(run("predict", str(tmp_path / "nowhere.xyz"), "-m", str(model)), 2)
    assert "give a model" in one_line(run("predict", str(structures)), 2)
    assert "unknown property" in one_line(run("predict", str(structures), "-m", str(model), "-p", "mass"), 2)
    one_line(run("predict", str(structures), "-m", str(model), "-o", "/nowhere/out.xyz"), 1)
    one_line(run("predict", str(structures), "-m", str(model), "--backend", "abacus"), 2)
    skipped = run("predict", str(bad), "-m", str(model), "--skip-bad", "-o", str(tmp_path / "out.xyz"))
    assert skipped.returncode == 1
    assert "left out: frame 2" in skipped.stderr


def energies(text: str) -> list[float]:
    found = [float(value) for value in re.findall(r" energy=(\S+)", text)]
    assert len(found) == 2
    return found


def test_predict_by_a_server(model: Path, structures: Path) -> None:
    # One backend for both: which one is the fastest is measured, and another one rounds otherwise.
    with running(models=[str(model)], loader="nepcore:load", threads=1, backend="loop") as server:
        server.ready(60)
        done = run("predict", str(structures), "--url", server.url, "-q", "-p", "energy,forces")
        assert done.returncode == 0, done.stderr
        here = run("predict", str(structures), "-m", str(model), "--backend", "loop", "-q", "-p", "energy,forces")
        assert energies(done.stdout) == pytest.approx(energies(here.stdout), abs=1e-12)
        # What the server says no to is one line, too.
        assert "'nobody'" in one_line(run("predict", str(structures), "-m", "nobody", "--url", server.url, "-q"), 1)
    assert "Is the server running" in one_line(run("predict", str(structures), "--url", server.url, "-q"), 1)


@pytest.mark.parametrize(
    "words",
    [
        ("--url", "127.0.0.1:8000"),
        ("--url", "http://127.0.0.1:x"),
        ("--url", "http://[::1"),
        ("--url", "unix://socket"),
        ("--url", "http://127.0.0.1:9", "--api-key", "two words"),
    ],
    ids=" ".join,
)
def test_predict_refuses_an_address_in_one_line(
    structures: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["predict", str(structures), *words, "-q"])
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("nepserve: ")
    assert told.count("\n") == 1


def test_predict_without_the_key_names_its_flag(model: Path, structures: Path) -> None:
    with running(models=[str(model)], api_keys=["me:0123456789abcdef"]) as server:
        server.wait_for("ready after", 60)
        told = one_line(run("predict", str(structures), "--url", server.url, "-q"), 1)
        assert "401" in told
        assert "--api-key" in told
        assert "NEPSERVE_API_KEY" in told


def test_env() -> None:
    sections = json.loads(run("env", "--json").stdout)
    assert sections["nepserve"]["version"] == nepcore.__version__
    assert sections["packages"]["numpy"]
    assert sections["torch"]["version"]
    assert "cores" in sections["machine"]
    text = run("env").stdout
    assert "packages" in text


def test_env_keeps_secrets() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nepserve", "env"], capture_output=True, text=True, timeout=120, check=True,
        env={"PATH": "/usr/bin", "NEPSERVE_API_KEYS": "me:0123456789abcdef", "NEPSERVE_PORT": "77"},
    )  # fmt: skip
    assert "0123456789abcdef" not in done.stdout
    assert "77" in done.stdout


def test_without_the_server_packages(model: Path, structures: Path) -> None:
    plain = without("torch", "fastapi", "starlette", "uvicorn", "pydantic_settings", "orjson", "ase")
    for words in (["version"], ["check", str(model)], ["env"], ["--help"]):
        done = subprocess.run([*plain, *words], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
    for words in (["serve"], ["serve", "--help"], ["predict", str(structures), "-m", str(model)]):
        done = subprocess.run([*plain, *words], capture_output=True, text=True, timeout=60, check=False)
        assert "pip install 'nepserve[server]'" in one_line(done, 2)


def test_unknown_commands_and_flags() -> None:
    for words in (["train-me"], ["serve", "--prot", "1"], ["check"]):
        done = run(*words)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


def test_a_reader_that_has_seen_enough(model: Path, tmp_path: Path) -> None:
    many = tmp_path / "many.xyz"
    many.write_text(XYZ * 3000)
    command = f"{sys.executable} -m nepserve predict {many} -m {model} -q | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "1\n"
    assert "Traceback" not in done.stderr
