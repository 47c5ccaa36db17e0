"""The counters of a report as a text file for Prometheus' textfile collector."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pario.errors import OptionError, how_to_install
from pario.stats.rank import RankStats
from pario.stats.report import Report

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
    """Replace the file atomically: a reader sees the old or the new content. Raises OSError; OptionError without
    prometheus_client.

    job_id : tells the series of several jobs on one dataset apart, as the file's name does for the loaders of a job"""
    try:
        from prometheus_client import CollectorRegistry, write_to_textfile
    except ImportError as e:
        raise OptionError("Options(metrics_file=...) needs prometheus_client", hint=how_to_install("metrics")) from e
    registry = CollectorRegistry()
    registry.register(_Collector(report, job_id, Path(path).stem))
    write_to_textfile(path, registry)


class _Collector:
    def __init__(self, report: Report, *names: str) -> None:
        self._report, self._names = report, names

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        report = self._report
        labels = ("job_id", "loader", "dataset", "node", "rank")

        def labelled(rank: RankStats) -> tuple[str, ...]:
            return *self._names, report.path, str(rank.node), str(rank.rank)

        for field, (name, what) in (_COUNTERS | _GAUGES).items():
            kind = GaugeMetricFamily if field in _GAUGES else CounterMetricFamily
            family = kind(f"pario_{name}", what, labels=labels)
            for rank in report.ranks:
                if rank.reader or field not in _READERS_ONLY:
                    family.add_metric(labelled(rank), getattr(rank, field))
            yield family
        knob = GaugeMetricFamily("pario_knob", "A value that may change, now.", labels=(*labels, "name"))
        for rank in report.ranks:
            for name, each in rank.knobs.items():
                knob.add_metric((*labelled(rank), name), each["value"])
        what = "Busy time of the slowest rank, as a multiple of the median rank's."
        skew = GaugeMetricFamily("pario_rank_skew_ratio", what, labels=labels[:3])
        skew.add_metric((*self._names, report.path), report.skew[1])
        yield from (knob, skew)
