"""The project holds what it says of itself: commands, versions, the package, the images."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import nepcore
from checkout import PAGES, PYPROJECT, ROOT, files, read

if TYPE_CHECKING:
    from pathlib import Path

PROJECT = PYPROJECT["project"]
TARGETS = set(re.findall(r"^([a-z][a-z-]*):.*## ", read("Makefile"), re.MULTILINE))
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


# Commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_make_has_every_target_that_a_page_names(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    code = re.findall(r"^```.*?^```|`[^`\n]+`", text, re.MULTILINE | re.DOTALL)
    named = {target for part in code for target in re.findall(r"(?:^|`)make ([a-z][a-z-]*)", part, re.MULTILINE)}
    assert named <= TARGETS


def test_the_two_commands_stand_in_the_readme() -> None:
    assert re.search(r"^make serve\b.*\nmake test\b", read("README.md"), re.MULTILINE)


def test_continuous_integration_runs_the_command_of_the_readme() -> None:
    lines = [line.strip() for line in read(".ci/run").splitlines()]
    assert "$make test" in lines
    assert lines[-1] == "$make test", "what pytest says last must be what the script says last"
    assert "set -euo pipefail" in lines
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


@needs_make
@pytest.mark.parametrize("target", ["help", "serve", "test", "test-full", "lint", "format", "bench", "docs", "clean"])
def test_targets_can_be_made(target: str) -> None:
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@needs_make
def test_make_alone_lists_the_targets() -> None:
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {line.split()[1] for line in done.stdout.splitlines()} == TARGETS


@needs_make
@pytest.mark.parametrize(
    ("words", "wanted", "unwanted"),
    [
        (["MODEL=a.txt b=c.txt"], "serve a.txt b=c.txt", "--host"),
        (["HOST=0.0.0.0", "PORT=9000"], "--host 0.0.0.0 --port 9000", "a.txt"),
        (["ARGS=--dtype float64"], "--dtype float64", "--port"),
    ],
    ids=["models", "address", "flags"],
)
def test_make_serve_hands_on_what_it_is_given(words: list[str], wanted: str, unwanted: str) -> None:
    # Some shells export HOST as the name of the machine; that must not become an address.
    environment = {"PATH": "/usr/bin:/bin", "HOST": "workstation"}
    done = subprocess.run(
        ["make", "--dry-run", "serve", *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    command = re.sub(r"\s+", " ", done.stdout.splitlines()[-1])
    assert wanted in command
    assert unwanted not in command
    assert "workstation" not in command


@needs_make
def test_a_python_that_cannot_make_environments_is_one_clear_line(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    # A Python without the module venv, as Debian has it.
    python.write_text(f'#!/bin/sh\ncase "$2" in *venv*) exit 1;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["make", f"VENV={tmp_path / 'venv'}", f"PYTHON={python}", "serve"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert len(said) == 1
    assert "python3-venv" in said[0]


# Versions ---------------------------------------------------------------------------------------------------------


def test_versions_agree() -> None:
    assert nepcore.__version__ == PROJECT["version"]
    assert version("nepserve") == PROJECT["version"]
    assert re.search(r"^## (\S+?),", read("CHANGELOG.md"), re.MULTILINE)[1] == PROJECT["version"]
    for name in ("Dockerfile.cuda", "Dockerfile.rocm"):
        assert re.search(r"^ARG VERSION=(.+)$", read(name), re.MULTILINE)[1] == PROJECT["version"]


def test_the_tested_torch_is_the_same_everywhere() -> None:
    made = re.search(r"^TORCH \?= (.+)$", read("Makefile"), re.MULTILINE)[1]
    assert re.search(r"^ARG TORCH=(.+)$", read("Dockerfile.cuda"), re.MULTILINE)[1] == made
    assert made in read("docs/install.md")
    wanted = next(r for r in map(Requirement, PROJECT["optional-dependencies"]["server"]) if r.name == "torch")
    assert not any(s.operator in {"<", "<=", "==", "~="} for s in wanted.specifier), "a bound replaces vendors' builds"


def test_the_lock_of_the_images_pins_what_the_server_needs() -> None:
    pins = {}
    for line in read("docker/constraints.txt").splitlines():
        if not line.startswith("#"):
            name, _, pinned = line.partition("==")
            pins[name] = pinned
    wanted = [Requirement(r) for r in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["server"])]
    for requirement in wanted:
        name = canonicalize_name(requirement.name)
        if name == "torch" or (requirement.marker and not requirement.marker.evaluate()):
            continue
        assert name in pins, f"run `make lock`: {name} is missing"
        assert requirement.specifier.contains(pins[name]), f"run `make lock`: {name}"


# The tree ---------------------------------------------------------------------------------------------------------


def test_the_readme_names_only_figures_that_have_a_script() -> None:
    for page in PAGES:
        for script in re.findall(r"bench/[\w/]+\.py", page.read_text(encoding="utf-8")):
            assert (ROOT / script).is_file(), f"{page.name} names {script}"
    _, _, figures = read("README.md").partition("## Figures\n")
    for part in re.split(r"^### ", figures.partition("\n## ")[0], flags=re.MULTILINE):
        if "|" in part:
            assert re.search(r"bench/\w+\.py", part), f"figures without a script: {part[:80]}"


def test_no_file_names_a_registry_or_a_place_on_one_machine() -> None:
    hosts = (
        "pypi" + r"\.org", "python" + r"hosted\.org", "download" + r"\.pytorch", r"docker" + r"\.io", r"nvcr" + r"\.io",
        "ghcr" + r"\.io", "quay" + r"\.io", "npm" + r"js\.", r"conda\." + "anaconda",
    )  # fmt: skip
    places = (r"(?<![\w.$])/work" + "/", r"(?<![\w.$])/root" + "/", r"/opt/py" + "pi")
    wrong = re.compile("|".join((*hosts, *places)))
    found = []
    for path in files():
        if "static" in path.parts or path.suffix in {".npz", ".gz", ".png"}:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if wrong.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found


# The package ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "content")
    return folder / "content"


def test_the_wheel_has_both_packages_and_nothing_else(unpacked: Path) -> None:
    assert {p.name for p in unpacked.iterdir()} == {"nepcore", "nepserve", f"nepserve-{PROJECT['version']}.dist-info"}
    source = {
        p.relative_to(ROOT / top).as_posix()
        for top in ("model", "service")
        for p in files()
        if p.is_relative_to(ROOT / top)
    }
    packed = {
        p.relative_to(unpacked).as_posix()
        for package in ("nepcore", "nepserve")
        for p in (unpacked / package).rglob("*")
        if p.is_file()
    }
    assert packed == source
    assert {"nepcore/py.typed", "nepserve/py.typed", "nepserve/app/static/swagger-ui-bundle.js"} <= packed
    licences = {p.name for p in unpacked.glob("*.dist-info/licenses/*")}
    assert {"LICENSE", "NOTICE"} <= licences


def test_the_plain_package_needs_nothing_of_the_server(unpacked: Path) -> None:
    """As an installation without extras would be: what other distributions bring cannot be imported."""
    code = f"""
import importlib.metadata, re, sys
from packaging.requirements import Requirement

allowed = set()
def allow(name):
    name = re.sub(r"[-_.]+", "-", name).lower()
    if name in allowed:
        return
    allowed.add(name)
    for text in importlib.metadata.distribution(name).requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({{"extra": ""}}):
            allow(requirement.name)
for name in {[Requirement(r).name for r in PROJECT["dependencies"]]!r}:
    allow(name)
tops = {{top: [re.sub(r"[-_.]+", "-", n).lower() for n in names]
        for top, names in importlib.metadata.packages_distributions().items()}}

class Absent:
    def find_spec(self, name, path=None, target=None):
        owners = tops.get(name.partition(".")[0], ())
        if owners and not set(owners) & (allowed | {{"nepserve", "packaging", "setuptools"}}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.path.insert(0, {str(unpacked)!r})
sys.meta_path.insert(0, Absent())
try:
    import torch
except ModuleNotFoundError:
    pass
else:
    sys.exit("the test does not hide torch")
import nepcore, nepcore.files.nep_txt, nepcore.files.xyz, nepcore.synthetic
import nepserve.client, nepserve.client.aio
assert nepserve.client.__file__.startswith({str(unpacked)!r})
from nepserve import cli
import io, contextlib
for words, wanted in ((["version"], 0), (["--help"], 0), (["serve"], 2), (["check", "missing.txt"], 1)):
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            cli.main(words)
    except SystemExit as end:
        assert (end.code or 0) == wanted, (words, end.code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "pip install 'nepserve[server]'" in done.stderr


# The images -------------------------------------------------------------------------------------------------------

INSTRUCTIONS = {
    "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "RUN", "SHELL", "STOPSIGNAL",
    "USER", "VOLUME", "WORKDIR",
}  # fmt: skip
DOCKERFILES = ("Dockerfile.cuda", "Dockerfile.rocm")


def _instructions(name: str) -> list[tuple[str, str]]:
    lines = [line for line in read(name).splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined.splitlines()]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfiles_parse(name: str) -> None:
    parsed = _instructions(name)
    assert {word for word, _ in parsed} <= INSTRUCTIONS
    assert parsed[0][0] == "ARG"
    base = parsed[0][1].removeprefix("BASE_IMAGE=")
    assert ":" in base
    assert not base.endswith(":latest")
    stages = [rest for word, rest in parsed if word == "FROM"]
    assert stages[0] == "${BASE_IMAGE} AS base"
    assert stages[1:] == ["base AS build", "base"]
    last = parsed[max(i for i, (word, _) in enumerate(parsed) if word == "FROM") :]
    uid, _, gid = next(rest for word, rest in last if word == "USER").partition(":")
    assert int(uid) > 0
    assert int(gid) > 0
    assert json.loads(next(rest for word, rest in last if word == "ENTRYPOINT")) == ["nepserve"]
    assert json.loads(next(rest for word, rest in last if word == "CMD")) == ["serve"]
    check = next(rest for word, rest in last if word == "HEALTHCHECK")
    assert json.loads(check.partition("CMD ")[2])[-1].endswith("health.py")
    assert ("STOPSIGNAL", "SIGTERM") in last
    assert ("EXPOSE", "8000") in last
    assert ("VOLUME", "/var/cache/nepserve") in last


def test_the_images_are_one_recipe() -> None:
    """They differ in their base, in the torch they install, and in what NVIDIA's runtime asks for."""
    cuda, rocm = ({f"{a} {b}" for a, b in _instructions(name)} for name in DOCKERFILES)
    allowed = ("ARG BASE_IMAGE=", "ARG TORCH=", "ENV NVIDIA_")
    assert all(line.startswith(allowed) for line in cuda ^ rocm), cuda ^ rocm


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_an_image_copies_is_there_and_reaches_the_build(name: str) -> None:
    sent = {line[1:] for line in read(".dockerignore").splitlines() if line.startswith("!")}
    for word, rest in _instructions(name):
        if word == "COPY" and not rest.startswith("--from"):
            source = rest.split()[0]
            assert (ROOT / source).exists()
            assert source == "." or source.split("/")[0] in sent
    # What the build backend reads besides the packages.
    assert {"pyproject.toml", PROJECT["readme"], *PROJECT["license-files"]} <= sent
    packages = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {package.split("/")[0] for package in packages} <= sent


@pytest.mark.parametrize("script", ["docker/install.sh", ".ci/run"])
def test_scripts_parse(script: str) -> None:
    shell = "sh" if script.endswith(".sh") else "bash"
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert subprocess.run([shell, "-n", str(ROOT / script)], check=False).returncode == 0


def test_the_compose_file_uses_both_images() -> None:
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load(read("deploy/compose.yaml"))["services"]
    assert {s["build"]["dockerfile"] for s in services.values()} == set(DOCKERFILES)
    for service in services.values():
        assert service["read_only"] is True
        assert service["command"][0] == "serve"
        assert any(str(v).endswith(":/var/cache/nepserve") for v in service["volumes"])
