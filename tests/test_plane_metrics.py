"""The state of a plane as Prometheus reads it: its own parser is the oracle."""

from __future__ import annotations

import math

import pytest

from pario.plane.metrics import metrics_text

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
    labels = {"user": "anna", "job": '7 "x"\\', "name": "a{b}"}
    assert found["pario_control_store_bytes_per_second"] == [(labels, 39.5e6)]
    assert found["pario_control_granted_operations_per_second"] == [(labels, math.inf)]
    assert found["pario_control_capacity_bytes_per_second"] == [({}, 100e6)]
    assert found["pario_control_plane_connections"] == [({}, 4.0)]
    assert found["pario_control_job_processes"] == [(labels, 3.0)]
    assert len(found) == 3 + 2 + 6 + 1
    assert all(family.type == "gauge" and family.documentation.endswith(".") for family in families.values())
