"""The state of a control plane as text for Prometheus' textfile collector."""

from __future__ import annotations

from typing import Any

from pario.text import metric

#: key of a job's state -> (its word in a metric's name, what it is)
_PER_JOB = {
    "used": ("store", "that a job asked of the store, as it reported last"),
    "grant": ("granted", "that a job may ask of the store"),
    "guarantee": ("guaranteed", "that the rules guarantee a job"),
}
#: label -> key of a job's state; `job` is a label that Prometheus itself sets
_LABELS = {"user": "user", "job_id": "job", "name": "name"}
_PLANE = {
    "uptime_s": ("plane_uptime_seconds", "Seconds since the control plane was started."),
    "connections": ("plane_connections", "Connections of the control plane."),
    "cycle_s": ("plane_cycle_seconds", "Seconds that the last computing and sending of grants took."),
}


def metrics_text(state: dict[str, Any]) -> str:
    """state : of `Plane.state`. No limit is +Inf."""
    lines: list[str] = []
    jobs = [({label: str(job[key]) for label, key in _LABELS.items()}, job) for job in state["jobs"]]

    def gauge(name: str, what: str, values: list[tuple[dict[str, str], float | None]]) -> None:
        lines.extend(metric("gauge", f"pario_control_{name}", what, values))

    for key, (name, what) in _PLANE.items():
        gauge(name, what, [({}, state[key])])
    capacity = zip(("bytes", "operations"), state["capacity"], strict=True)
    for unit, value in capacity:
        gauge(f"capacity_{unit}_per_second", f"{unit.capitalize()} per second that the jobs share.", [({}, value)])
    for key, (word, what) in _PER_JOB.items():
        for which, unit in enumerate(("bytes", "operations")):
            values = [(labels, job[key][which]) for labels, job in jobs]
            gauge(f"{word}_{unit}_per_second", f"{unit.capitalize()} per second {what}.", values)
    gauge("job_processes", "Processes of a job.", [(labels, job["members"]) for labels, job in jobs])
    return "\n".join(lines) + "\n"
