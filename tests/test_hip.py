"""A stand-in for PyTorch built for ROCm, which calls its GPUs ``cuda`` and has no ``torch.version.cuda``.

What only a card can show (that kernels run, and how fast) is not shown here; that they compile for three of them is, in
``tests/nepcore/fused``.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from checkout import ROOT  # noqa: E402
from nepcore.backends import candidates, choices, mulsum, resolve  # noqa: E402
from nepcore.calculator import find_device  # noqa: E402
from nepcore.errors import ModelError  # noqa: E402
from nepcore.synthetic import make_model  # noqa: E402
from nepserve import environment  # noqa: E402
from nepserve.engine import memory, served  # noqa: E402

SOURCES = [path for folder in ("model/nepcore", "service/nepserve") for path in sorted((ROOT / folder).rglob("*.py"))]

CARD = SimpleNamespace(
    name="AMD Instinct MI300X", total_memory=192 * 2**30, gcnArchName="gfx942:sramecc+:xnack-", major=9, minor=4,
    multi_processor_count=304, warp_size=64,
)  # fmt: skip


@pytest.fixture
def hip(monkeypatch):
    """One such card, as far as asking about it goes."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4.43482-0f2d60242", raising=False)
    for name, value in {
        "is_available": True, "is_initialized": True, "device_count": 1, "get_device_name": CARD.name,
        "get_device_properties": CARD, "get_device_capability": (9, 4), "mem_get_info": (180 * 2**30, 192 * 2**30),
        "memory_allocated": 7, "memory_reserved": 8,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    # A CUDA driver's version is no question for this build.
    monkeypatch.delattr(torch._C, "_cuda_getDriverVersion", raising=False)


def test_its_devices_are_found_and_named(hip):
    assert find_device("auto") == torch.device("cuda", 0)
    assert find_device("cuda") == torch.device("cuda", 0)
    with pytest.raises(ModelError, match=r"sees 1 GPU") as caught:
        find_device("cuda:1")
    assert "CUDA" not in re.sub(r"CUDA_VISIBLE_DEVICES|torch \S+", "", str(caught.value))
    with pytest.raises(ModelError, match="cuda also means ROCm"):
        find_device("mps")
    with pytest.raises(ModelError, match="cuda"):
        find_device("hip")


def test_a_choice_is_kept_for_this_card_and_runtime(hip, monkeypatch):
    model = make_model(("Si",))
    key = choices.key_of(model, torch.device("cuda", 0), "float32")
    assert key["device"]["name"] == CARD.name
    assert key["device"]["runtime"] == torch.version.hip
    assert "None" not in json.dumps(key["device"])
    monkeypatch.setattr(torch.version, "hip", "7.0.1")
    assert choices.key_of(model, torch.device("cuda", 0), "float32") != key


def test_backends_are_chosen_as_for_a_gpu(hip):
    device, model = torch.device("cuda", 0), make_model(("Si", "Ge"))
    assert resolve.by_rule("cuda", 5) == "mulsum"
    assert mulsum.takes_one_hot("cuda", 89)
    for name in candidates.names():
        reason = candidates.get(name).unfit(model, device)
        assert "CUDA" not in reason
        assert ("fused-cpu" in name) == ("CPU" in reason)


def test_the_engine_says_what_it_runs_on(hip):
    found = served.hardware("cuda:0")
    assert (found["hip"], found["name"]) == (torch.version.hip, CARD.name)
    assert "cuda" not in found
    assert memory.usage() | {"resident": 0} == {
        "resident": 0, "device_allocated": 7, "device_reserved": 8, "device_free": 180 * 2**30,
        "device_total": 192 * 2**30,
    }  # fmt: skip


def test_the_report_for_bugs_names_hip_and_the_architecture(hip):
    report = environment.report()
    assert report["torch"]["HIP"] == torch.version.hip
    assert "CUDA" not in report["torch"]
    assert report["torch"]["GPU 0"] == f"{CARD.name}, 192.0 GiB, {CARD.gcnArchName}"
    assert "compute capability" not in environment.text(report)


PROGRAM = """
import sys
import torch
torch.version.cuda, torch.version.hip = None, "6.4.43482"
import nepcore
from nepcore import bundled
from nepcore.calculator import Calculator
a = 2.025
crystal = nepcore.Structure.make(["Al"], [[0.0, 0, 0]], [[0, a, a], [a, 0, a], [a, a, 0]])
for backend in sys.argv[1:]:
    calculator = Calculator.of(bundled.model(), device="cpu", backend=backend)
    print(calculator.evaluate(crystal)["energy"][0])
from nepserve.cli import main
main(["env"])
"""


def test_such_a_build_computes_on_the_cpu_too():
    """In a process of its own, so that all modules are imported by it; the command ends it."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "loop", "bmm", "mulsum"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    energies = [float(line) for line in lines[:3]]
    assert max(energies) - min(energies) < 1e-5
    assert any(line.split()[:1] == ["HIP"] for line in lines)
    assert all(line.split()[:1] != ["CUDA"] for line in lines)


# What the sources say ----------------------------------------------------------------------------------------------

# Of torch.cuda what builds for ROCm have as well; none of it asks NVIDIA's libraries by name.
OF_TORCH_CUDA = {
    "CUDAGraph", "Event", "Stream", "current_stream", "device_count", "empty_cache", "get_device_capability",
    "get_device_name", "get_device_properties", "graph", "graph_pool_handle", "is_available", "is_initialized",
    "max_memory_allocated", "mem_get_info", "memory_allocated", "memory_reserved", "reset_peak_memory_stats",
    "set_device", "stream", "synchronize",
}  # fmt: skip


def dotted(node: ast.AST) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def test_the_sources_ask_torch_for_nothing_that_only_cuda_has():
    used, versions = set(), {}
    for path in SOURCES:
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)):
            name = dotted(node) if isinstance(node, ast.Attribute) else ""
            if re.fullmatch(r"torch\.cuda\.\w+", name):
                used.add(name.removeprefix("torch.cuda."))
            if name == "torch.version.cuda":
                versions[path.name] = text
            assert not name.startswith(("torch.backends.cuda.", "torch.backends.cudnn.")), path
    assert len(used) > 10
    assert used <= OF_TORCH_CUDA
    for name, text in versions.items():
        assert re.search(r"torch\.version(\.hip|, \"hip\")", text), f"{name} knows one of the two only"


def test_no_message_speaks_of_cuda_alone():
    said = []
    for path in SOURCES:
        tree = ast.parse(path.read_text("utf-8"))
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docstrings = {id(n.body[0].value) for n in ast.walk(tree) if isinstance(n, documented) and n.body
                      and isinstance(n.body[0], ast.Expr)}  # fmt: skip
        # A string by itself, behind an assignment, is a docstring as well.
        docstrings |= {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                text = node.value.replace("CUDA_VISIBLE_DEVICES", "").replace("PYTORCH_CUDA_ALLOC_CONF", "")
                if re.search(r"CUDA|NVIDIA", text) and not re.search(r"HIP|ROCm|AMD", text):
                    said.append((path.name, node.value))
    # The report for bugs names the version of whichever there is, and so do errors that are looked for.
    assert {entry for entry in said if entry[0] not in {"environment.py", "backend.py"}} == set()
    assert [entry for entry in said if entry[0] == "environment.py"] == [("environment.py", "CUDA")]


def test_every_kernel_that_is_launched_is_compiled_ahead_for_amd():
    pytest.importorskip("triton")
    launched = set()
    for path in SOURCES:
        if "triton" in path.read_text("utf-8") or "fused" in path.parts:
            found = re.findall(r"^\s+(?:\w+\.)?(\w+)\[\(.*?\)?\]?\(", path.read_text("utf-8"), re.MULTILINE)
            launched |= set(found)
    names = set()
    for script in (ROOT / "tests/fused_compile.py", ROOT / "tests/nepcore/fused/compile_search.py"):
        spec = importlib.util.spec_from_file_location(f"{script.stem}_of_hip", script)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        for entry in (*module.KERNELS, *getattr(module, "TRAINING", ())):
            names.add(entry if isinstance(entry, str) else entry[0].__name__)
    assert len(launched) > 15
    assert launched <= names
    for page in ("test_compile.py", "test_compile_search.py"):
        text = (ROOT / "tests/nepcore/fused" / page).read_text("utf-8")
        assert {"gfx90a", "gfx942", "gfx1100"} <= set(re.findall(r"hip:(gfx\w+)", text))
