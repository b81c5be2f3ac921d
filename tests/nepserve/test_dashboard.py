"""The Grafana dashboard asks for series that a server really has, with labels that they really have."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from nepcore.structures import Structure, Structures
from servers import running, write_model
from traffic import Link, Request, answered_alone, blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

DASHBOARD = Path(__file__).resolve().parents[2] / "deploy" / "grafana-dashboard.json"


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, set[str]]]:
    """Labels by series, of a server that has seen good and bad requests."""
    model = write_model(tmp_path_factory.mktemp("dashboard") / "main.txt", "C", "Si", "Ge")
    stand_in = {"memory": 20, "memory_from": 6, "faults": {"Ge": "refuse"}}
    with running(models=[str(model)], stand_in=stand_in) as server:
        server.ready()
        answered_alone(server, blocks(2))
        link = Link(server)
        faulty = Structures.pack([Structure.make(["Ge"], np.zeros((1, 3))), *([blocks(1)[0].view(0)] * 20)])
        assert link.ask(Request.of(faulty)).status == 200
        assert link.ask(Request.of(faulty), X_Request_Timeout="1e-9").code == "deadline_passed"
        found: dict[str, set[str]] = defaultdict(set)
        for line in server.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name, _, labels = line.rpartition(" ")[0].partition("{")
                found[name] |= set(re.findall(r"(\w+)=\"", labels))
        yield found


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_every_series_of_the_dashboard_is_served(dashboard: dict[str, Any], series: dict[str, set[str]]) -> None:
    asked = {name for text in expressions(dashboard) for name in re.findall(r"\b(?:nepserve|process)_\w+", text)}
    assert len(asked) > 15
    assert asked - set(series) == set()
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            name, label = re.findall(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])[0]
            assert label == "instance" or label in series[name]


def test_every_label_of_the_dashboard_is_there(dashboard: dict[str, Any], series: dict[str, set[str]]) -> None:
    # Prometheus itself adds the server a series came from.
    for text in expressions(dashboard):
        for name, selected in re.findall(r"\b((?:nepserve|process)_\w+)\{([^}]*)\}", text):
            wanted = set(re.findall(r"(\w+)(?:=~|=)\"", selected)) - {"instance"}
            assert wanted <= series[name], (name, wanted)
        for labels in re.findall(r"by \(([^)]*)\)", text):
            (name,) = set(re.findall(r"\b(?:nepserve|process)_\w+", text))
            assert set(re.split(r",\s*", labels)) - {"instance"} <= series[name], text


def test_every_series_of_the_product_is_shown(dashboard: dict[str, Any], series: dict[str, set[str]]) -> None:
    """What is not worth a place on the dashboard is not worth a series."""
    shown = " ".join(expressions(dashboard))
    stems = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in series if name.startswith("nepserve_")}
    assert {stem for stem in stems if stem not in shown} == set()


def test_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert place["x"] + place["w"] <= 24
        assert not taken & cells, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
