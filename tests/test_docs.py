"""The documentation builds, stays on this host, and says what the program does."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from checkout import PAGES, ROOT, blocks, read
from nepcore.files import nep_txt
from nepcore.structures import PROPERTIES
from nepcore.synthetic import make_model
from nepserve.settings import _NOT_OF_SERVE, FIELDS, flag_of
from servers import running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from servers import ServerProcess


# The site ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation as HTML."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def test_the_pages_load_nothing_from_another_host(site: Path) -> None:
    loads = re.compile(
        r"""<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)\s*=\s*["']?(?:https?:)?//[^\s"'>]+"""
        r"""|url\(\s*["']?(?:https?:)?//[^)]+|@import[^;]*//[^;]+"""
    )
    pages = list(site.rglob("*.html"))
    assert len(pages) > 10
    for path in [*pages, *site.rglob("*.css")]:
        assert not loads.findall(path.read_text(encoding="utf-8")), path.relative_to(site)


def test_every_page_is_in_the_navigation(site: Path) -> None:
    named = re.findall(r":\s(\w+\.md)$", read("mkdocs.yml"), re.MULTILINE)
    assert sorted(named) == sorted(p.name for p in (ROOT / "docs").glob("*.md"))
    for name in named:
        assert (site / name).with_suffix(".html").is_file()


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent == ROOT], ids=lambda p: p.name)
def test_links_between_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


# What the pages say -----------------------------------------------------------------------------------------------


def _settings_table() -> object:
    spec = importlib.util.spec_from_file_location("settings_table", ROOT / "docs" / "settings_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_settings_is_the_one_of_the_settings_class() -> None:
    made = _settings_table()
    assert made.page_with(made.table()) == read("docs/serve.md"), "run `make format`"


def test_flags_that_pages_name_exist() -> None:
    flags = {flag_of(name) for name in FIELDS}
    known = flags | {"--config", "--show-config", "--help"}
    for name in ("serve.md", "batching.md", "troubleshooting.md"):
        text = re.sub(r"^```.*?^```", "", read(f"docs/{name}"), flags=re.MULTILINE | re.DOTALL)
        assert set(re.findall(r"--[a-z][a-z-]+", text)) <= known, name
    for name in PAGES:
        for variable in re.findall(r"NEPSERVE_([A-Z_]+)\b(?!=tcp)", name.read_text(encoding="utf-8")):
            assert variable.lower() in {*FIELDS, *_NOT_OF_SERVE}, (name.name, variable)


def test_every_property_is_specified() -> None:
    text = read("docs/conventions.md")
    for name in PROPERTIES:
        assert re.search(rf"^\| `{name}` \|", text, re.MULTILINE), name


# What the pages show, tried ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> Iterator[ServerProcess]:
    """The server of `make serve`, on a free port."""
    with running(loader="nepcore:load") as server:
        yield server.ready(120)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages find in a checkout, and a model."""
    folder = tmp_path_factory.mktemp("place")
    shutil.copytree(ROOT / "examples", folder / "examples")
    shutil.copy(ROOT / "examples" / "silicon.xyz", folder / "structures.xyz")
    nep_txt.write(make_model(["Si", "C"]), folder / "nep.txt")
    return folder


def test_the_call_of_the_readme_has_the_answer_of_the_readme(demo: ServerProcess) -> None:
    call = next(b for b in blocks(ROOT / "README.md", "sh") if b.startswith("curl"))
    assert call in blocks(ROOT / "docs" / "quickstart.md", "sh")
    answer = demo.evaluate(**json.loads(call.partition("-d '")[2].rpartition("'")[0])).json()
    [shown] = map(json.loads, blocks(ROOT / "README.md", "json"))
    assert answer.keys() == shown.keys()
    for name, value in shown.items():
        if isinstance(value, str) or name == "pbc":
            assert answer[name] == value
        else:
            np.testing.assert_allclose(answer[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md", "docs/library.md"])
def test_the_python_of_the_pages_runs(page: str, demo: ServerProcess, place: Path) -> None:
    pytest.importorskip("ase")
    found = blocks(ROOT / page, "python")
    assert found
    code = "\n".join(found).replace("http://127.0.0.1:8000", demo.url)
    done = subprocess.run([sys.executable, "-c", code], cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_commands_of_the_pages_run(page: str, place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "examples", tmp_path / "examples")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    lines = [line for b in blocks(ROOT / page, "sh") for line in b.splitlines() if line.startswith(".venv/bin/")]
    assert any("predict" in line for line in lines)
    for line in lines:
        done = subprocess.run(line, cwd=tmp_path, shell=True, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (line, done.stderr)


def test_the_example_relaxes(demo: ServerProcess, place: Path) -> None:
    pytest.importorskip("ase")
    done = subprocess.run(
        [sys.executable, "examples/relax.py", demo.url], cwd=place, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    energies = [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("BFGS:")]
    assert len(energies) > 3
    assert energies[-1] < energies[0]


@pytest.mark.parametrize("how", ["port", "service link", "nothing there"])
def test_the_health_check_of_the_images(demo: ServerProcess, how: str) -> None:
    variables = {
        "port": {"NEPSERVE_PORT": str(demo.address[1])},
        # Kubernetes' variable is no port; the default one is asked, where nothing of this test listens.
        "service link": {"NEPSERVE_PORT": "tcp://10.0.0.1:8000", "NEPSERVE_UDS": "/nowhere/at.all"},
        "nothing there": {"NEPSERVE_UDS": "/nowhere/at.all"},
    }[how]
    done = subprocess.run(
        [sys.executable, str(ROOT / "docker" / "health.py")], env={**os.environ, **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == (0 if how == "port" else 1)
    assert done.stderr.strip().count("\n") == 0
    if how != "port":
        assert "no answer" in done.stderr
