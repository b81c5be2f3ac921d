"""The recipes of deploy/: each by its own tool where that is installed, and what can be said without one."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from checkout import ROOT
from nepserve.client.replicas import Replicas
from nepserve.settings import FIELDS

DEPLOY = ROOT / "deploy"
yaml = pytest.importorskip("yaml")


def tool(name: str) -> str:
    # Tools of the environment count, whether it is activated or not.
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if found is None:
        pytest.skip(f"there is no {name}")
    return found


def run(*command: str, **more) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def manifests() -> dict[str, dict]:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes/nepserve.yaml").read_text("utf-8"))
    return {document["kind"]: document for document in documents}


def test_the_yaml_is_clean():
    files = [DEPLOY / name for name in ("compose.yaml", "kubernetes/nepserve.yaml")]
    files += [DEPLOY / "helm/nepserve" / name for name in ("Chart.yaml", "values.yaml")]
    run(tool("yamllint"), "-s", "-c", str(DEPLOY / ".yamllint"), *map(str, files))


def test_the_scripts_are_clean():
    run(tool("shellcheck"), str(DEPLOY / "slurm.sh"), str(ROOT / "docker/install.sh"))


def test_the_dockerfiles_are_clean():
    run(tool("hadolint"), str(ROOT / "Dockerfile.cuda"), str(ROOT / "Dockerfile.rocm"))


@pytest.mark.parametrize("profile", ["nvidia", "amd"])
def test_compose_understands_its_file(profile):
    """By the old program of that name or by docker's plugin, whichever there is; neither needs a daemon for it."""
    program = shutil.which("docker-compose")
    command = [program] if program else [tool("docker"), "compose"]
    done = run(*command, "-f", str(DEPLOY / "compose.yaml"), "--profile", profile, "config")
    service = yaml.safe_load(done.stdout)["services"][profile]
    assert service["read_only"] is True
    if profile == "amd":
        said = [device["source"] if isinstance(device, dict) else device for device in service["devices"]]
        assert [device.partition(":")[0] for device in said] == ["/dev/kfd", "/dev/dri"]
    else:
        assert service["deploy"]["resources"]["reservations"]["devices"][0]["driver"] == "nvidia"


def sections(name: str) -> dict[str, str]:
    """Of an Apptainer definition: its header under an empty name, then its parts."""
    parts = re.split(r"^%(\w+)\n", (DEPLOY / name).read_text("utf-8"), flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def test_the_apptainer_definition_does_what_the_dockerfiles_do():
    found = sections("nepserve.def")
    assert set(found) == {"", "files", "post", "environment", "runscript"}
    header = dict(line.split(": ", 1) for line in found[""].splitlines() if line[:1] not in {"", "#"})
    dockerfile = (ROOT / "Dockerfile.cuda").read_text("utf-8")
    assert header == {"Bootstrap": "docker", "From": re.search(r"^ARG BASE_IMAGE=(\S+)", dockerfile, re.MULTILINE)[1]}
    for line in found["files"].split("\n"):
        if line.strip():
            source, target = line.split()
            assert (ROOT / source).exists(), source
            assert target == f"/src/{source}"
    for part in ("post", "environment", "runscript"):
        run("sh", "-n", "-c", found[part])
    steps = re.findall(r"install\.sh (\w+)", found["post"])
    assert steps == re.findall(r"^RUN \S+install\.sh (\w+)", dockerfile, re.MULTILINE)
    given = dict(re.findall(r"(\w+)='?([^'\s]*)'?", found["post"].splitlines()[0].strip().removeprefix("export ")))
    for name in ("TORCH", "TORCH_INDEX_URL", "CONSTRAINTS"):
        assert given[name] == re.search(rf"^ARG {name}=(\S*)", dockerfile, re.MULTILINE)[1]
    for name, value in re.findall(r"(\w+)=(\S+)", found["environment"]):
        if name != "PATH":
            assert f"{name}={value}" in dockerfile


def test_the_check_of_the_images_says_what_it_needs():
    program = str(DEPLOY / "check-images")
    said = run(sys.executable, program, "--help").stdout
    for option in ("--base", "--torch-index", "--pip-conf", "--volume", "--keep"):
        assert option in said
    done = subprocess.run([sys.executable, program, "metal"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "there is no Dockerfile.metal" in done.stderr) == (2, True)


def test_the_unit_is_what_systemd_understands(tmp_path):
    program = tool("systemd-analyze")
    text = (DEPLOY / "nepserve.service").read_text("utf-8").replace("/opt/nepserve/bin/nepserve", sys.executable)
    unit = tmp_path / "nepserve.service"
    unit.write_text(text)
    done = subprocess.run([program, "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False)
    said = [line for line in done.stderr.splitlines() if "nepserve.service" in line]
    assert said == []


def test_the_parts_in_kubernetes_belong_together():
    found = manifests()
    pod = found["Deployment"]["spec"]["template"]
    container = pod["spec"]["containers"][0]
    labels = pod["metadata"]["labels"].items()
    for selector in (
        found["Deployment"]["spec"]["selector"]["matchLabels"],
        found["Service"]["spec"]["selector"],
        found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] in ports
    assert found["Service"]["spec"]["ports"][0]["targetPort"] in ports
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    target = found["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", found["Deployment"]["metadata"]["name"])
    assert "replicas" not in found["Deployment"]["spec"], "it would undo what the autoscaler does"


@pytest.mark.parametrize("recipe", ["compose.yaml", "kubernetes/nepserve.yaml", "nepserve.service", "slurm.sh"])
def test_every_setting_in_a_recipe_exists(recipe):
    text = (DEPLOY / recipe).read_text("utf-8")
    code = "\n".join(line.partition("# ")[0] for line in text.splitlines())
    said = set(re.findall(r"NEPSERVE_([A-Z_]+)(?==|:|,)", code))
    assert said
    assert {name.lower() for name in said} <= set(FIELDS)


def test_the_slurm_script_lists_servers_that_are_ready_and_takes_them_out_again(tmp_path):
    """A stand-in for srun runs the one task here; one for the server becomes ready, and ends when it is told to."""
    if os.name != "posix" or shutil.which("flock") is None:
        pytest.skip("needs flock")
    tools = tmp_path / "bin"
    tools.mkdir()
    server = f"""#!{sys.executable}
import os, signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Ready(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
assert sys.argv[1:] == ["serve", "/m/nep.txt", "--devices", "cpu:1"], sys.argv
assert os.environ["NEPSERVE_API_KEY_FILE"]
HTTPServer(("127.0.0.1", int(os.environ["NEPSERVE_PORT"])), Ready).serve_forever()
"""
    for name, text in (("nepserve", server), ("srun", '#!/bin/bash\nshift\nexec "$@"\n')):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    addresses, keys = tmp_path / "addresses.txt", tmp_path / "keys.txt"
    environment = {
        **os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "MODEL": "/m/nep.txt", "DEVICES": "cpu:1",
        "ADDRESSES": str(addresses), "KEYS": str(keys), "PORT": str(port),
    }  # fmt: skip
    job = subprocess.Popen([str(DEPLOY / "slurm.sh")], env=environment)
    try:
        import time

        end = time.monotonic() + 30
        while not (addresses.exists() and addresses.read_text()) and time.monotonic() < end:
            time.sleep(0.05)
        assert addresses.read_text() == f"http://{socket.gethostname()}:{port}\n"
        [listed] = Replicas(f"file:{addresses}").members
        assert listed.address.text == f"http://{socket.gethostname()}:{port}"
        assert stat.S_IMODE(keys.stat().st_mode) == 0o600
        job.terminate()
        assert job.wait(20) == 0
        assert addresses.read_text() == ""
    finally:
        if job.poll() is None:
            job.kill()
            job.wait()
