"""Settings: precedence, where each value came from, and one line for what is wrong."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from nepserve import settings
from nepserve.app.auth import Keys, keys_of
from nepserve.settings import FIELDS, Settings, SettingsError, load, show

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("NEPSERVE_"):
            monkeypatch.delenv(name)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_flag_beats_variable_beats_file_beats_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "server.toml", 'port = 1\nhost = "127.0.0.2"\nmax_body_mb = 1\n')
    monkeypatch.setenv("NEPSERVE_PORT", "2")
    monkeypatch.setenv("NEPSERVE_HOST", "127.0.0.3")
    loaded = load({"port": "3"}, file)
    found = loaded.settings
    assert (found.port, found.host, found.max_body_mb, found.keep_alive) == (3, "127.0.0.3", 1.0, 75.0)
    assert loaded.origins["port"] == "--port"
    assert loaded.origins["host"] == "NEPSERVE_HOST"
    assert loaded.origins["max_body_mb"] == str(file)
    assert loaded.origins["keep_alive"] == "default"


def test_the_file_may_come_from_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEPSERVE_CONFIG", str(write(tmp_path / "a.toml", "port = 77")))
    loaded = load({})
    assert loaded.settings.port == 77
    assert loaded.remarks == ()


def test_lists_from_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ("a=x.txt", "y.txt")
    assert load({"models": list(wanted)}).settings.models == wanted
    assert load({}, write(tmp_path / "a.toml", 'models = ["a=x.txt", "y.txt"]')).settings.models == wanted
    monkeypatch.setenv("NEPSERVE_MODELS", "a=x.txt, y.txt")
    assert load({}).settings.models == wanted


def test_show_names_the_origin_and_reads_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEPSERVE_KEEP_ALIVE", "5")
    flags: dict[str, Any] = {"models": ['odd "name".txt', "b"], "model_dir": str(tmp_path), "insecure": True}
    loaded = load(flags)
    text = show(loaded)
    assert all(name in text for name in FIELDS)
    monkeypatch.delenv("NEPSERVE_KEEP_ALIVE")
    again = load({}, write(tmp_path / "shown.toml", text))
    assert again.settings == loaded.settings
    lines = {line.partition(" ")[0]: line.rpartition("# ")[2] for line in text.splitlines()}
    assert lines["keep_alive"] == "NEPSERVE_KEEP_ALIVE"
    assert lines["models"] == "MODEL"
    assert lines["port"] == "default"


def test_show_keeps_secrets() -> None:
    loaded = load({"api_keys": ["me:0123456789abcdef"]})
    assert "0123456789abcdef" not in show(loaded)
    assert "0123456789abcdef" not in repr(loaded)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"port": "http"}, "--port: "),
        ({"port": "70000"}, "--port: "),
        ({"max_body_mb": "0"}, "--max-body-mb: "),
        ({"threads": "0"}, "--threads: "),
        ({"dtype": ["float16"]}, "--dtype: 'float16' is neither float32 nor float64"),
        ({"dtype": ["si=half"]}, "--dtype: 'si=half' is neither"),
        ({"log_format": "xml"}, "--log-format: "),
        ({"ssl_certfile": "a.pem"}, "ssl_certfile and ssl_keyfile are needed together"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_values_name_their_flag(flags: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(flags)
    text = str(caught.value)
    assert text.startswith(told)
    assert "\n" not in text


def test_bad_variables_and_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.toml", 'port = "x"')
    with pytest.raises(SettingsError, match=r"a\.toml: port: "):
        load({}, file)
    with pytest.raises(SettingsError, match=r"a.toml: there is no setting 'prot' \(did you mean 'port'\?\)"):
        load({}, write(file, "prot = 1"))
    with pytest.raises(SettingsError, match=r"a.toml: .*line 1"):
        load({}, write(file, "port = \nhost = 1"))
    with pytest.raises(SettingsError, match="no such settings file"):
        load({}, tmp_path / "nowhere.toml")
    monkeypatch.setenv("NEPSERVE_PORT", "eighty")
    with pytest.raises(SettingsError, match="NEPSERVE_PORT: "):
        load({})


def test_misspelt_variables_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEPSERVE_HOTS", "0.0.0.0")
    monkeypatch.setenv("NEPSERVE_API_KEY", "for the client")
    (remark,) = load({}).remarks
    assert "NEPSERVE_HOTS" in remark
    assert "'host'" in remark


def test_service_links_of_kubernetes_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEPSERVE_PORT", "tcp://10.96.0.12:8000")
    monkeypatch.setenv("NEPSERVE_SERVICE_HOST", "10.96.0.12")
    monkeypatch.setenv("NEPSERVE_SERVICE_PORT_HTTP", "8000")
    monkeypatch.setenv("NEPSERVE_PORT_8000_TCP_ADDR", "10.96.0.12")
    loaded = load({})
    assert loaded.settings.port == 8000
    assert loaded.origins["port"] == "default"
    assert len(loaded.remarks) == 1


def test_dtype_of_a_model() -> None:
    found = Settings(dtype=("si=float64", "float32", "ge=float32", "float64", "ge=float64"))
    assert [found.dtype_of(name) for name in ("si", "ge", "other")] == ["float64", "float32", "float64"]
    assert Settings().dtype_of("any") == "float32"


@pytest.mark.parametrize(
    ("given", "local"),
    [
        ({}, True),
        ({"host": "127.9.9.9"}, True),
        ({"host": "::1"}, True),
        ({"host": "localhost"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "::"}, False),
        ({"host": "10.1.1.1"}, False),
        ({"host": "a.host.somewhere"}, False),
        ({"host": "0.0.0.0", "uds": "/tmp/x.sock"}, True),
    ],
    ids=str,
)
def test_who_can_connect(given: dict[str, Any], local: bool) -> None:
    assert Settings(**given).is_local is local


def test_a_server_that_others_reach_has_a_key() -> None:
    keys, secret = keys_of(Settings(host="0.0.0.0"))
    assert secret is not None
    key = keys.match(f"Bearer {secret}".encode())
    assert key is not None
    assert key.admin
    assert keys_of(Settings(host="0.0.0.0"))[1] != secret
    for given in (Settings(), Settings(host="0.0.0.0", insecure=True)):
        keys, secret = keys_of(given)
        assert (len(keys), secret) == (0, None)
    keys, secret = keys_of(Settings(host="0.0.0.0", api_keys=("me:0123456789abcdef",)))
    assert (keys.names, secret) == (["me"], None)


def test_key_files(tmp_path: Path) -> None:
    file = write(
        tmp_path / "keys", "# who may ask\nlaptop 0123456789abcdef\n\nroot fedcba9876543210 admin # the boss\n"
    )
    keys, _ = keys_of(Settings(api_key_file=file))
    assert keys.names == ["laptop", "root"]
    laptop, boss = keys.match(b"Bearer 0123456789abcdef"), keys.match(b"bearer  fedcba9876543210")
    assert laptop is not None
    assert boss is not None
    assert (laptop.admin, boss.admin) == (False, True)
    assert keys.match(b"Bearer #") is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("laptop\n", "line 1: wanted a name and a key"),
        ("\nlaptop 0123456789abcdef guest\n", "line 2: wanted"),
        ("laptop tooshort\n", "shorter than 16"),
        ("a 0123456789abcdef\na fedcba9876543210\n", "two API keys are called 'a'"),
        ("# nothing\n", "there is no key in this file"),
    ],
)
def test_bad_key_files(tmp_path: Path, text: str, told: str) -> None:
    file = write(tmp_path / "keys", text)
    with pytest.raises(SettingsError, match=told) as caught:
        keys_of(Settings(api_key_file=file))
    assert "0123456789abcdef" not in str(caught.value)


def test_key_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="nowhere"):
        keys_of(Settings(api_key_file=tmp_path / "nowhere"))


def test_no_keys_match_nothing() -> None:
    assert Keys().match(b"Bearer x") is None
    assert Keys().match(None) is None


def test_every_field_is_described() -> None:
    for name in settings.FIELDS:
        assert Settings.model_fields[name].description, name
