"""The Helm chart: linted and rendered by Helm's own engine, held against Kubernetes' schemas and the manifests."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import subprocess
import sys

import pytest

import nepcore
from checkout import ROOT
from nepserve.scale.policy import Policy
from nepserve.settings import FIELDS, Settings

CHART = ROOT / "deploy/helm/nepserve"
yaml = pytest.importorskip("yaml")
needs_helm = pytest.mark.skipif(importlib.util.find_spec("helm_python") is None, reason="there is no helm_python")

# Helm is written in Go: its runtime, with its signals and threads, stays out of the process of the tests.
_PROGRAM = """
import json, sys
import helm_python
what, chart, values = json.load(sys.stdin)
if what == "lint":
    print(json.dumps(helm_python.lint(chart, values, strict=True)))
else:
    with helm_python.Chart.load(chart) as found:
        try:
            print(json.dumps(found.render(values, name="nepserve", namespace="science")))
        except helm_python.HelmError as error:
            print(json.dumps({"error": str(error)}))
"""

VALUES = {
    "default": {},
    "amd": {"image": {"tag": "rocm"}, "gpu": {"resource": "amd.com/gpu", "count": 2}},
    "no gpu, keys of its own": {
        "gpu": {"count": 0},
        "keys": {"secret": "", "lines": ["boss wordofthe-boss admin", "md another-word"]},
        "autoscaling": {"enabled": False},
        "replicas": 3,
        "cache": {"claim": "nepserve-cache"},
        "env": {"NEPSERVE_MAX_QUEUE_ATOMS": "10000000"},
    },
    "one without keys": {"keys": {"secret": ""}, "autoscaling": {"enabled": False}, "preStopSeconds": 0},
    "all that may be added": {
        "imagePullSecrets": [{"name": "pull"}],
        "podAnnotations": {"prometheus.io/scrape": "true"},
        "nodeSelector": {"gpu": "yes"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "service": {"type": "LoadBalancer", "port": 80},
    },
}


@functools.cache
def helm(what: str, values: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], input=json.dumps([what, str(CHART), json.loads(values)]), check=False,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def rendered(name: str) -> dict[str, dict]:
    """Manifests by kind."""
    texts = helm("render", json.dumps(VALUES[name]))
    documents = [d for path, text in texts.items() if path.endswith(".yaml") for d in yaml.safe_load_all(text)]
    return {document["kind"]: document for document in documents if document}


def pod_of(found: dict[str, dict]) -> dict:
    return found["Deployment"]["spec"]["template"]["spec"]


def manifests() -> dict[str, dict]:
    text = (ROOT / "deploy/kubernetes/nepserve.yaml").read_text("utf-8")
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


@needs_helm
@pytest.mark.parametrize("name", VALUES)
def test_helm_finds_nothing_to_complain_about(name):
    report = helm("lint", json.dumps(VALUES[name]))
    assert report["total_charts_linted"] == 1
    assert report["errors"] == []
    # 2 is a warning; a chart without an icon is worth an information.
    assert [message for message in report["messages"] if message["severity"] >= 2] == []


@needs_helm
@pytest.mark.parametrize("name", VALUES)
def test_what_it_makes_is_what_kubernetes_takes(name):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    found = rendered(name)
    assert {"Deployment", "Service", "PodDisruptionBudget"} <= set(found)
    for document in found.values():
        kubernetes_validate.validate(document, "1.30", strict=True)


def test_the_plain_manifests_are_what_kubernetes_takes():
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for document in manifests().values():
        kubernetes_validate.validate(document, "1.30", strict=True)


@needs_helm
@pytest.mark.parametrize("name", VALUES)
def test_its_parts_belong_together(name):
    found = rendered(name)
    pod, spec = pod_of(found), found["Deployment"]["spec"]
    container = pod["containers"][0]
    labels = spec["template"]["metadata"]["labels"].items()
    for selector in (
        spec["selector"]["matchLabels"],
        found["Service"]["spec"]["selector"],
        found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert found["Service"]["spec"]["ports"][0]["targetPort"] in {port["name"] for port in container["ports"]}
    said = [entry["name"].removeprefix("NEPSERVE_").lower() for entry in container["env"]]
    assert set(said) <= set(FIELDS)
    assert ("HorizontalPodAutoscaler" in found) == ("replicas" not in spec)
    sleep = int(container["lifecycle"]["preStop"]["exec"]["command"][1]) if "lifecycle" in container else 0
    drain = next(float(e["value"]) for e in container["env"] if e["name"] == "NEPSERVE_SHUTDOWN_TIMEOUT")
    assert pod["terminationGracePeriodSeconds"] > sleep + drain


@needs_helm
def test_its_defaults_are_the_plain_manifests():
    chart, plain = rendered("default"), manifests()
    assert set(chart) == set(plain)
    for found in (chart, plain):
        for document in found.values():
            document["metadata"].pop("labels", None)
        spec = found["Deployment"]["spec"]
        for part in (spec["selector"], spec["template"]["metadata"], found["PodDisruptionBudget"]["spec"]["selector"]):
            part.clear()
        found["Service"]["spec"].pop("selector")
        container = pod_of(found)["containers"][0]
        container.pop("imagePullPolicy", None)
        container["env"] = [e for e in container["env"] if e["name"] != "NEPSERVE_SHUTDOWN_TIMEOUT"]
    # The Service's type is said, which is the default one.
    assert chart["Service"]["spec"].pop("type") == "ClusterIP"
    assert chart == plain


@needs_helm
def test_the_gpu_is_what_the_values_say():
    limits = {name: pod_of(rendered(name))["containers"][0]["resources"]["limits"] for name in VALUES}
    assert limits["default"]["nvidia.com/gpu"] == "1"
    assert limits["amd"]["amd.com/gpu"] == "2"
    assert "nvidia.com/gpu" not in limits["amd"]
    assert list(limits["no gpu, keys of its own"]) == ["memory"]
    assert pod_of(rendered("amd"))["containers"][0]["image"] == "nepserve:rocm"
    assert "--devices" not in pod_of(rendered("no gpu, keys of its own"))["containers"][0]["args"]


@needs_helm
def test_keys_come_from_a_secret_or_make_one_or_the_server_does():
    made = rendered("no gpu, keys of its own")
    name = made["Secret"]["metadata"]["name"]
    assert made["Secret"]["stringData"]["keys.txt"] == "boss wordofthe-boss admin\nmd another-word\n"
    assert {"name": "keys", "secret": {"secretName": name}} in pod_of(made)["volumes"]
    given = rendered("default")
    assert "Secret" not in given
    assert {"name": "keys", "secret": {"secretName": "nepserve-keys"}} in pod_of(given)["volumes"]
    none = rendered("one without keys")
    assert "Secret" not in none
    assert all(entry["name"] != "NEPSERVE_API_KEY_FILE" for entry in pod_of(none)["containers"][0]["env"])
    assert "several servers need common keys" in helm("render", json.dumps({"keys": {"secret": ""}}))["error"]


@needs_helm
@pytest.mark.parametrize(
    "values",
    [
        {"gpus": 1},
        {"gpu": {"resource": "gpu"}},
        {"replicas": 0},
        {"keys": {"lines": ["alone"]}},
        {"models": {"serve": []}},
    ],
    ids=["unknown", "resource", "replicas", "key", "no model"],
)
def test_values_that_mean_nothing_are_refused(values):
    assert "schema" in helm("render", json.dumps(values))["error"]


def test_versions_and_defaults_agree_with_the_package():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    assert chart["appVersion"] == nepcore.__version__
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    assert set(values) == set(schema["properties"]) - {"global"}
    assert values["shutdownSeconds"] == Settings.model_fields["shutdown_timeout"].default
    assert values["autoscaling"]["queueAtoms"] < Settings.model_fields["max_queue_atoms"].default, (
        "a queue that is full before the target is reached never asks for another card"
    )


def test_the_autoscalers_ask_for_what_the_sizing_counted():
    text = (ROOT / "docs/operate.md").read_text("utf-8")
    counted = re.search(r"([\d,]+) × ([\d,]+) ≈ ([\d.]+) million\s+for\s+one\s+second", text)
    assert counted is not None
    rate, atoms = (int(number.replace(",", "")) for number in counted.groups()[:2])
    million = float(counted[3])
    assert rate * atoms == pytest.approx(1e6 * million, rel=0.01)
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    assert values["autoscaling"]["queueAtoms"] == 1e6 * million
    assert Policy.queue_atoms == pytest.approx(1e6 * million)
    target = manifests()["HorizontalPodAutoscaler"]["spec"]["metrics"][0]["pods"]["target"]
    assert int(target["averageValue"]) == 1e6 * million
