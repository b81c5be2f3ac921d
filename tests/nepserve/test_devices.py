from __future__ import annotations

import os
import subprocess

import pytest

from nepserve import devices
from nepserve.devices import VISIBLE, devices_of, only
from nepserve.settings import SettingsError


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch):
    for name in (*VISIBLE, "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def named(words, threads=None):
    return [(d.name, d.device) for d in devices_of(words, threads)]


def test_engines_on_the_cpu_share_its_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(7), raising=False)
    assert named("cpu") == [("cpu", "cpu")]
    assert named("cpu:3") == [("cpu#1", "cpu"), ("cpu#2", "cpu"), ("cpu#3", "cpu")]
    assert [d.threads for d in devices_of("cpu:3", None)] == [2, 2, 2]
    assert [d.threads for d in devices_of("cpu:9", None)] == [1] * 9
    assert [d.threads for d in devices_of("cpu:2", 5)] == [5, 5]


@pytest.mark.parametrize("words", ["0,2", "cuda:0,cuda:2", " 0, 2 "])
def test_each_engine_sees_its_own_gpu_alone_whatever_the_vendor_calls_it(words):
    found = devices_of(words, None)
    assert [d.name for d in found] == ["cuda:0", "cuda:2"]
    # A process that sees one GPU calls it the first.
    assert {d.device for d in found} == {"cuda"}
    assert [d.environment for d in found] == [dict.fromkeys(VISIBLE, "0"), dict.fromkeys(VISIBLE, "2")]


@pytest.mark.parametrize("name", VISIBLE)
def test_numbers_count_among_the_visible(monkeypatch, name):
    monkeypatch.setenv(name, "5,GPU-8932f937-d72c")
    assert only(0) == dict.fromkeys(VISIBLE, "5")
    assert only(1) == dict.fromkeys(VISIBLE, "GPU-8932f937-d72c")
    with pytest.raises(SettingsError, match="2 that are visible"):
        only(2)


def test_what_rocr_hides_is_gone_before_the_others_count(monkeypatch):
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "3")
    assert only(0) == dict.fromkeys(VISIBLE, "0")


@pytest.mark.parametrize("words", ["", "gpu", "0,0", "-1", "0;1", "cpu:0", "cpu:x", "cpu:9999", "cuda:", "0,cpu", "½"])
def test_what_stands_for_no_device_is_refused(words):
    with pytest.raises(SettingsError, match="--devices"):
        devices_of(words, None)


def test_all_are_counted_by_torch_in_another_process(monkeypatch):
    said = "some library greets\ngpus 2\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, said, ""))
    assert named("all") == [("cuda:0", "cuda"), ("cuda:1", "cuda")]


@pytest.mark.parametrize(
    ("out", "err", "reason"),
    [("gpus 0", "", "no GPU here"), ("", "Traceback\nImportError: no torch", "no torch"), ("", "", "no reason")],
    ids=["none", "no torch", "silence"],
)
def test_all_of_none_is_refused_with_the_reason(monkeypatch, out, err, reason):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, out, err))
    with pytest.raises(SettingsError, match=reason):
        devices_of("all", None)


def test_the_count_is_what_torch_says():
    torch = pytest.importorskip("torch")
    assert devices._count_gpus() == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
