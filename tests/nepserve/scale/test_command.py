"""``nepserve scale``: its flags, what replicas are told, and what is refused before anything is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nepserve import settings
from nepserve.models import ModelNameError
from nepserve.scale.ray_cluster import ClusterError, Share, _spell
from nepserve.scale.run import NOT_OF_A_REPLICA, Wanted, plain, with_devices
from nepserve.settings import FIELDS, Settings, SettingsError, flag_of
from servers import write_model


def scale(*words: str, before: str = "") -> subprocess.CompletedProcess[str]:
    program = f"{before}\nfrom nepserve.cli import main\nmain()"
    return subprocess.run(
        [sys.executable, "-c", program, "scale", *words], capture_output=True, text=True, timeout=120, check=False
    )


def test_the_flags_of_a_server_hold_here_but_for_where_it_listens() -> None:
    help_text = scale("--help").stdout
    for name in FIELDS:
        if name != "models":
            assert (f"{flag_of(name)} " in help_text) is (name not in NOT_OF_A_REPLICA) or name in {"insecure"}, name
    for flag in ("--engine", "--replicas", "--min", "--max", "--queue-atoms", "--gpus", "--address-file"):
        assert flag in help_text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--engine", "magic"], "--engine magic: wanted ray"),
        (["--replicas", "2", "--max", "3"], "--replicas"),
        (["--min", "2"], "--min needs --max"),
        (["--min", "3", "--max", "2"], "--max 2 is less than --min 3"),
        (["--gpus", "1.5"], "--gpus 1.5"),
        (["--dtype", "half"], "--dtype"),
        (["/nowhere/nep.txt"], "/nowhere/nep.txt"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_contradicts_itself_is_one_line(words: list[str], told: str) -> None:
    done = scale(*words)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("nepserve: ")
    assert done.stderr.count("\n") == 1
    assert told in done.stderr


def test_without_ray_the_way_to_install_it_is_told() -> None:
    gone = (
        "import sys\n"
        "class Gone:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'ray':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Gone())\n"
    )
    done = scale("--log-level", "error", before=gone)
    assert done.returncode == 2
    assert done.stderr == (
        "nepserve: this needs the package 'ray', which is not installed: pip install 'nepserve[ray]'\n"
    )


def test_replicas_are_told_all_that_was_said_with_paths_that_hold_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = write_model(Path("nep.txt"), "Si")
    config = Path("c.toml")
    config.write_text('port = 9000\nmodel_dir = "."\nuds = "s.sock"\n')
    monkeypatch.delenv("NEPSERVE_TUNE_SECONDS")
    monkeypatch.setenv("NEPSERVE_DTYPE", "float64")
    monkeypatch.setenv("NEPSERVE_API_KEYS", "alice:a-key-of-sixteen-letters")
    loaded = settings.load({"models": ["a=nep.txt", str(model)], "api_key_file": "keys.txt", "insecure": True}, config)
    values = plain(loaded)
    assert values == {
        "port": 0,
        "models": [f"a={tmp_path}/nep.txt", f"nep={tmp_path}/nep.txt"],
        "model_dir": str(tmp_path),
        "dtype": ["float64"],
        "api_keys": ["alice:a-key-of-sixteen-letters"],
        "api_key_file": f"{tmp_path}/keys.txt",
        "insecure": True,
    }
    again = Settings(**values)
    assert again.dtype_of("a") == "float64"
    assert again.model_dir == tmp_path
    with pytest.raises(ModelNameError):
        plain(settings.load({"models": ["a=x", "a=y"]}))


@pytest.mark.parametrize(
    ("given", "share", "found"),
    [
        ({}, Share(0, 3), {"device": "cpu", "threads": 3}),
        ({}, Share(0, 0.5), {"device": "cpu", "threads": 1}),
        ({"threads": 7}, Share(0, 2), {"device": "cpu", "threads": 7}),
        ({}, Share(1, 1), {"device": "cuda"}),
        ({}, Share(0.25, 1), {"device": "cuda"}),
        ({}, Share(4, 1), {"devices": "all"}),
        ({"devices": "cpu:2"}, Share(0, 2), {"devices": "cpu:2"}),
        ({"device": "cpu"}, Share(1, 1), {"device": "cpu"}),
    ],
    ids=str,
)
def test_a_replica_takes_what_the_cluster_gives_it(given, share, found) -> None:
    assert with_devices(given, share) == found


@pytest.mark.parametrize(
    ("wanted", "gpus", "share", "numbers"),
    [
        (Wanted(), 0, 0, (1, 1)),
        (Wanted(), 8, 1, (8, 8)),
        (Wanted(), 8, 0.5, (16, 16)),
        (Wanted(), 8, 4, (2, 2)),
        (Wanted(replicas=3), 8, 1, (3, 3)),
        (Wanted(most=4), 8, 1, (1, 4)),
        (Wanted(least=2, most=4), 0, 0, (2, 4)),
    ],
    ids=str,
)
def test_how_many(wanted, gpus, share, numbers) -> None:
    policy = wanted.policy(gpus, share)
    assert (policy.least, policy.most) == numbers


def test_addresses_of_a_cluster() -> None:
    assert [_spell(a) for a in ("auto", "head", "10.0.0.1:7000")] == ["auto", "head:6379", "10.0.0.1:7000"]
    with pytest.raises(ClusterError, match="--ray-address"):
        _spell("ray://head:10001")


def test_wanted_is_checked() -> None:
    Wanted(replicas=2).check()
    Wanted(least=1, most=1, gpus=0.5).check()
    with pytest.raises(SettingsError):
        Wanted(most=0).check()
