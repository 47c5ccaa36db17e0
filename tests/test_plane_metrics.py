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
    "capacity": [100e6, None],
    "uptime_s": 12.5,
    "connections": 4,
    "cycle_s": 0.001,
}


def test_what_prometheus_reads() -> None:
    families = {family.name: family for family in parser.text_string_to_metric_families(metrics_text(STATE))}
    found = {name: [(sample.labels, sample.value) for sample in family.samples] for name, family in families.items()}
    labels = {"user": "anna", "job_id": '7 "x"\\', "name": "a{b}"}
    assert found["pario_control_store_bytes_per_second"] == [(labels, 39.5e6)]
    assert found["pario_control_granted_operations_per_second"] == [(labels, math.inf)]
    assert found["pario_control_capacity_bytes_per_second"] == [({}, 100e6)]
    assert found["pario_control_plane_connections"] == [({}, 4.0)]
    assert found["pario_control_job_processes"] == [(labels, 3.0)]
    assert len(found) == 3 + 2 + 6 + 1
    assert all(family.type == "gauge" and family.documentation.endswith(".") for family in families.values())


def test_the_dashboard_shows_metrics_that_exist() -> None:
    panels = json.loads((Path(__file__).parents[1] / "docs" / "grafana.json").read_text())["panels"]
    # Prometheus replaces a label `job` by the name of its own job.
    assert not any("{{job}}" in panel["targets"][0]["legendFormat"] for panel in panels)
    shown = {name for panel in panels for name in re.findall(r"pario_\w+", panel["targets"][0]["expr"])}
    there = {family.name for family in parser.text_string_to_metric_families(metrics_text(STATE))}
    assert shown <= there | {f"pario_{name}_total" for name, _ in _COUNTERS.values()}
    assert len(panels) >= 4
    assert shown & there
