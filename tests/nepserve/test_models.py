"""Names of models, where their files are found, and the registry."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nepcore.errors import ModelFileError
from nepserve import models
from nepserve.models import Copy, ModelNameError, ModelNotGivenError, Registry, Source, UnknownModelError
from servers import write_model


def test_names_from_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run 7").mkdir()
    (tmp_path / "odd=name.txt").touch()
    words = ["Si_2022.txt", "a=x/y.nep.txt", "run 7", "odd=name.txt", "b=odd=name.txt", "/abs/c-d.txt"]
    assert models.parse_models(words) == {
        "Si_2022": Path("Si_2022.txt"),
        "a": Path("x/y.nep.txt"),
        "run-7": Path("run 7"),
        "odd-name": Path("odd=name.txt"),
        "b": Path("odd=name.txt"),
        "c-d": Path("/abs/c-d.txt"),
    }


def test_the_home_directory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert models.parse_models(["a=~/nep.txt"]) == {"a": Path("/home/somebody/nep.txt")}


@pytest.mark.parametrize("word", ["a b=x", "=x", "ä=x", f"{'x' * 65}=y", "-a=x", "a@b=x", "...", "a.=x"])
def test_names_that_cannot_be(word: str) -> None:
    with pytest.raises(ModelNameError):
        models.parse_models([word])


def test_two_of_a_name() -> None:
    with pytest.raises(ModelNameError, match=r"a/nep\.txt and b/nep\.txt"):
        models.parse_models(["a/nep.txt", "b/nep.txt"])


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no nep\.txt or nep_best\.txt"):
        models.locate(tmp_path)
    best = write_model(tmp_path / "nep_best.txt", "Si")
    assert models.locate(tmp_path) == best
    last = write_model(tmp_path / "nep.txt", "Si")
    assert models.locate(tmp_path) == last
    assert models.locate(tmp_path / "nowhere.txt") == tmp_path / "nowhere.txt"


def test_sources_keep_their_own_copy(tmp_path: Path) -> None:
    path = write_model(tmp_path / "nep.txt", "Si")
    content = path.read_bytes()
    source = models.read_model("si", path)
    path.write_text("something else")
    assert source.copy.path.read_bytes() == content
    assert source.file.elements == ("Si",)
    source.copy.close()
    assert not source.copy.path.exists()


def test_copies_without_memory_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    copy = Copy(b"text")
    assert copy.path.read_bytes() == b"text"
    assert copy.path.parent == tmp_path
    copy.close()
    assert list(tmp_path.iterdir()) == []


def test_bad_files_are_named_as_the_user_named_them(tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_text("nep4 1 Si\nnonsense\n")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ModelFileError, match=r"bad\.txt, line 2"):
        models.read_model("x", path)
    with pytest.raises(ModelFileError, match=r"^upload, line 1"):
        Source.from_bytes("x", "upload", b"nep9 1 Si\n")
    # A file that is refused leaves no copy open.
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_demonstration() -> None:
    source = models.demo_model()
    assert (source.name, source.origin) == ("demo-emt", "bundled")
    assert source.file.elements == ("Al", "Ni", "Cu", "Pd", "Ag", "Pt", "Au")
    source.copy.close()


def test_registry(tmp_path: Path) -> None:
    registry = Registry()
    with pytest.raises(ModelNotGivenError):
        registry.get(None)
    source = models.read_model("a", write_model(tmp_path / "a.txt", "Si"))
    first, second = registry.new_version(source, "float32"), registry.new_version(source, "float64")
    assert first.key != second.key
    assert models.public_name(first.key) == "a"
    assert registry.put(first) is None
    assert registry.get(None) is registry.get("a") is first
    assert registry.put(second) is first
    assert registry.get(None) is second
    registry.alias("latest", "a")
    assert registry.get("latest") is second
    with pytest.raises(UnknownModelError) as caught:
        registry.get("b")
    assert caught.value.served == ("a",)
    with pytest.raises(ModelNameError):
        registry.put(registry.new_version(Source("latest", "", source.file, "", source.copy), "float32"))
    assert registry.remove("a") is second
    with pytest.raises(UnknownModelError):
        registry.get("latest")
    source.copy.close()
