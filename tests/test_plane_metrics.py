"""The state of a plane as Prometheus reads it: its own parser is the oracle."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from pario.plane.metrics import metrics_text
from pario.stats.prometheus import _COUNTERS

parser = pytest.importorskip("prometheus_client.parser")

STATE = {
    "jobs": [
        {
            "user": "anna",
            "job": '7 "x"\\',
            "name": "a{b}",
            "nodes": 1,
            "members": 3,
            "lost": 0,
            "guarantee": [15e6, 0.0],
            "grant": [40e6, None],
            "used": [39.5e6, 120.0],
        }
    ],
    "agents": [
        {"user": "root", "node": "n7", "jobs": 2, "processes": 8, "heard_s": 0.25},
        {"user": "root", "node": "n8", "jobs": 1, "processes": 1, "heard_s": 0.5},
        {"user": "root", "node": "n7", "jobs": 3, "processes": 4, "heard_s": 0.75},
    ],
    "capacity": [100e6, None],
    "uptime_s": 12.5,
    "connections": 4,
    "cycle_s": 0.001,
}


def test_what_prometheus_reads() -> None:
    families = {family.name: family for family in parser.text_string_to_metric_families(metrics_text(STATE))}
    found = {name: [(sample.labels, sample.value) for sample in family.samples] for name, family in families.items()}
    labels = {"user": "anna", "job": '7 "x"\\', "name": "a{b}"}
    assert found["pario_control_store_bytes_per_second"] == [(labels, 39.5e6)]
    assert found["pario_control_granted_operations_per_second"] == [(labels, math.inf)]
    assert found["pario_control_capacity_bytes_per_second"] == [({}, 100e6)]
    assert found["pario_control_plane_connections"] == [({}, 4.0)]
    assert found["pario_control_job_processes"] == [(labels, 3.0)]
    # Several agents of a user on a node are one series: a second one with the same labels is refused.
    agents = [{"user": "root", "node": node} for node in ("n7", "n8")]
    assert found["pario_control_agent_jobs"] == list(zip(agents, [5.0, 1.0], strict=True))
    assert found["pario_control_agent_processes"] == list(zip(agents, [12.0, 1.0], strict=True))
    assert found["pario_control_agent_silent_seconds"] == list(zip(agents, [0.75, 0.5], strict=True))
    assert len(found) == 3 + 2 + 6 + 3 + 1
    assert all(family.type == "gauge" and family.documentation.endswith(".") for family in families.values())


def test_the_dashboard_shows_metrics_that_exist() -> None:
    panels = json.loads((Path(__file__).parents[1] / "docs" / "grafana.json").read_text())["panels"]
    shown = {name for panel in panels for name in re.findall(r"pario_\w+", panel["targets"][0]["expr"])}
    there = {family.name for family in parser.text_string_to_metric_families(metrics_text(STATE))}
    assert shown <= there | {f"pario_{name}_total" for name, _ in _COUNTERS.values()}
    assert len(panels) >= 4
    assert shown & there
