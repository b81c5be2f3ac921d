"""What the pages and examples about MD codes show, tried against a server of the synthetic model."""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("uvicorn")

from bridges import command, finish, serving, start, write_model
from checkout import ROOT, blocks, read

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers import ServerProcess

URL = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ServerProcess]:
    model = write_model(tmp_path_factory.mktemp("model") / "nep.txt")
    with serving(f"si={model}", dtype="float32") as found:
        yield found


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with what the pages find in a checkout; LAMMPS leaves its log where it runs."""
    folder = tmp_path_factory.mktemp("place")
    shutil.copytree(ROOT / "examples", folder / "examples")
    return folder


def run_python(code: str, server: ServerProcess, place: Path) -> str:
    found, output = finish(start("-c", code.replace(URL, server.url), cwd=place))
    assert found == 0, output
    return output


@needs("ase")
def test_the_page_about_ase(server, place):
    output = run_python("\n".join(blocks(ROOT / "docs" / "ase.md", "python")), server, place)
    assert "BFGS:" in output


@needs("lammps")
def test_the_page_about_lammps(server, place):
    [code] = blocks(ROOT / "docs" / "lammps.md", "python")
    output = run_python(code, server, place)
    [values] = re.findall(r"^(-?[\d.]+) (-?[\d.]+)$", output, re.MULTILINE)
    assert np.isfinite([float(value) for value in values]).all()


@needs("openmm")
def test_the_page_about_openmm(server, place):
    [code] = blocks(ROOT / "docs" / "openmm.md", "python")
    before = (
        "import numpy as np\n"
        "symbols = ['Si', 'Si']\n"
        "cell = (0.5 * np.eye(3)).tolist()\n"
        "positions = [[0, 0, 0], [0.2, 0.2, 0.2]]\n"
    )
    assert run_python(f"{before}{code}\nprint(context.getStepCount())", server, place).split()[-1] == "10"


@needs("lammps")
def test_the_example_of_lammps(server, place):
    found, output = finish(start("examples/lammps/run.py", "--url", server.url, "--steps", 40, cwd=place))
    assert found == 0, output
    assert "Loop time" in output


@needs("openmm")
def test_the_example_of_openmm(server, place):
    found, output = finish(start("examples/openmm_md.py", "--url", server.url, "--steps", 20, cwd=place))
    assert found == 0, output
    assert "step     20" in output


@needs("ipi")
def test_the_example_of_ipi(server, tmp_path):
    """Its socket gets another name: there may be only one of the one in the example on a machine."""
    shutil.copytree(ROOT / "examples" / "ipi", tmp_path / "ipi")
    folder = tmp_path / "ipi"
    name = f"nep-{tmp_path.name[-8:]}-{server.process.pid}"
    text = (folder / "input.xml").read_text()
    assert "<address> nep </address>" in text
    (folder / "input.xml").write_text(text.replace("<address> nep </address>", f"<address> {name} </address>"))
    line = next(line for line in blocks(ROOT / "docs" / "ipi.md", "sh")[0].splitlines() if "nepserve ipi" in line)
    words = line.replace(URL, server.url).replace("unix:nep", f"unix:{name}").split()[1:]
    code = "import sys; from ipi.engine.simulation import Simulation; Simulation.load_from_xml(open(sys.argv[1])).run()"
    host = start("-c", code, "input.xml", cwd=folder)
    try:
        found, output = finish(command(*words, cwd=folder))
        code, said = finish(host)
    finally:
        if host.poll() is None:
            host.kill()
            host.communicate()
        # i-PI leaves it behind.
        Path(f"/tmp/ipi_{name}").unlink(missing_ok=True)
    assert found == 0, output
    assert code == 0, said
    table = np.loadtxt(folder / "silicon.out")
    assert len(table) == 21
    assert np.isfinite(table).all()


def test_every_flag_of_the_command_is_on_the_page():
    found, output = finish(command("ipi", "--help"))
    assert found == 0
    page = read("docs/ipi.md")
    flags = {word.strip(",") for word in output.replace("│", " ").split() if word.startswith("--")}
    assert flags - {"--help", "--quiet"} <= {word.strip("`,()").split("`")[0] for word in page.split()}


@pytest.mark.parametrize("name", ["forcefield", "ipi", "lammps", "mdi", "openmm", "units"])
def test_a_bridge_brings_neither_the_server_nor_the_code_it_is_for(name):
    absent = ("torch", "fastapi", "pydantic", "orjson", "httpx", "ase", "lammps", "openmm", "mdi", "mpi4py")
    code = f"import sys, nepserve.client.{name}; print(*[name for name in {absent!r} if name in sys.modules])"
    assert finish(start("-c", code)) == (0, "\n")
