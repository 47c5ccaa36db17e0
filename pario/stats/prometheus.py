"""The counters of a report as a text file for Prometheus' textfile collector."""

from __future__ import annotations

from pathlib import Path

from pario.machine import replacing
from pario.stats.rank import RankStats
from pario.stats.report import Report
from pario.text import metric

#: field of RankStats -> (name without "pario_" and "_total", help); counters, labelled by rank
_COUNTERS = {
    "batches": ("batches", "Batches taken by the training loop."),
    "records": ("records", "Records taken by the training loop."),
    "skipped": ("skipped_records", "Records left out because the decoder could not read them."),
    "node_bytes": ("node_bytes", "Bytes of records taken from memory of the rank's node."),
    "bytes_read": ("read_bytes", "Bytes read from the store."),
    "reads": ("reads", "Reads from the store."),
    "peer_bytes": ("peer_bytes", "Bytes that came from the tiers of other nodes."),
    "served_bytes": ("served_bytes", "Bytes sent to other processes out of the node's tiers."),
    "stalls": ("stalls", "How often a rank had to wait for bytes, not counting the first wait of a loop."),
    "stalled": ("stalled_seconds", "Seconds that a rank waited for bytes, not counting the first wait of a loop."),
    "loop": ("loop_seconds", "Seconds in loops over the loader."),
    "consumer": ("consumer_seconds", "Seconds of the caller's own code between two batches."),
    "waiting": ("waiting_seconds", "Seconds that the caller waited for a batch, for any reason."),
    "decode": ("decode_seconds", "Seconds spent turning bytes into arrays."),
    "read": ("reading_seconds", "Seconds with at least one read in flight."),
    "turn": ("slot_wait_seconds", "Seconds that a reading rank waited for a free slot."),
}
#: the same for gauges
_GAUGES = {
    "ready_mean": ("ready_slots", "Full slots ahead of a rank, mean."),
    "in_flight": ("reads_in_flight", "Reads in flight at once, mean."),
    "depth": ("prefetch_depth", "Reads that may be in flight at once, now."),
}
_READERS_ONLY = {"bytes_read", "reads", "read", "turn", "in_flight", "depth"}


def write_metrics(report: Report, path: str, job_id: str) -> None:
    """Replace the file atomically: a reader sees the old or the new content. Raises OSError.

    job_id : tells the series of several jobs on one dataset apart, as the file's name does for the loaders of a job"""
    names = {"job_id": job_id, "loader": Path(path).stem, "dataset": report.path}

    def of(rank: RankStats) -> dict[str, str]:
        return {**names, "node": str(rank.node), "rank": str(rank.rank)}

    lines: list[str] = []
    for field, (name, what) in (_COUNTERS | _GAUGES).items():
        kind, end = ("gauge", "") if field in _GAUGES else ("counter", "_total")
        ranks = [rank for rank in report.ranks if rank.reader or field not in _READERS_ONLY]
        lines += metric(kind, f"pario_{name}{end}", what, [(of(rank), getattr(rank, field)) for rank in ranks])
    knobs = [({**of(rank), "name": name}, each["value"]) for rank in report.ranks for name, each in rank.knobs.items()]
    lines += metric("gauge", "pario_knob", "A value that may change, now.", knobs)
    what = "Busy time of the slowest rank, as a multiple of the median rank's."
    lines += metric("gauge", "pario_rank_skew_ratio", what, [(names, report.skew[1])])
    with replacing(path) as file:
        file.write("\n".join([*lines, ""]).encode())
