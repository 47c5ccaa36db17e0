"""Tiers and peers on nodes that we do not have: which node reads which chunk from where, and how long the flows take.

    store ---> link in ---> tier ---> the node's own batches; or link out ---> link in of another node

`simulate` counts: in each epoch it deals every chunk to nodes at random, which read it from where pario/tiers/ would.
`seconds` divides the bytes of each flow by its rate; the slowest flow sets the time. It knows no queues, no latency and
no processor, so a real epoch takes longer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pario.plan.placement import NOBODY, assign

__all__ = ["WAYS", "Epoch", "Job", "Rates", "Way", "hot_spot", "seconds", "simulate", "store_passes"]

#: no tiers; each node keeps what it has read, up to its quota; nodes share as pario's do; every node has all data
Way = Literal["none", "own", "peers", "local"]
WAYS: tuple[Way, ...] = ("none", "own", "peers", "local")

Array = npt.NDArray[Any]
_DATASET = 20_261_123  # the placement of another dataset differs a little
_COPIES = 4  # `COPIES` of pario/dataset/staging.py


@dataclass(frozen=True)
class Job:
    """A training run that begins with empty tiers.

    quota : of each node, as a part of the data
    readers : nodes that read each chunk in an epoch. 1: the nodes divide the epoch; `nodes`: each one trains a
        model of its own on all data
    chunks : of the data
    copies : of each chunk; None: up to four, and what else a node has room for it keeps for itself (pario's default)
    """

    nodes: int
    epochs: int = 5
    quota: float = 1.0
    readers: int = 1
    chunks: int = 4096
    copies: int | None = None

    @property
    def room(self) -> int:
        """Chunks that a node can keep."""
        return min(self.chunks, math.ceil(self.quota * self.chunks - 1e-9))


@dataclass(frozen=True)
class Rates:
    """Bytes per second."""

    store: float = math.inf  # of the shared store, for all nodes together
    link: float = math.inf  # into a node, and out of it
    serve: float = math.inf  # that one node's service gives to others
    tier: float = math.inf  # that one node's tier gives
    compute: float = math.inf  # that one node trains on
    prefetch: bool = True  # nodes read while they compute; False: they take turns


@dataclass(frozen=True)
class Epoch:
    """Chunks per node, f64[nodes]: read from the store, got from others, given to others, read from its own tier."""

    store: Array
    came: Array
    served: Array
    own: Array


class _Nodes:
    """What the nodes hold, from epoch to epoch."""

    def __init__(self, job: Job, way: Way) -> None:
        self.job = job
        self.random = np.random.default_rng(1)
        self.has = np.full((job.nodes, job.chunks), way == "local")
        self.keeps = np.zeros(self.has.shape, np.bool_)  # what the placement wants them to hold in the end
        self.owners = np.full((job.chunks, 1), NOBODY)  # see Placement
        self.room = np.full(job.nodes, job.room if way == "own" else 0)  # left on each node, without peers
        if way == "peers":
            self._share()

    def _share(self) -> None:
        """As `Stage.meet` does."""
        job = self.job
        self.owners = assign(_DATASET, np.arange(job.chunks), [job.room] * job.nodes, job.copies or _COPIES).owners
        chunks, columns = np.nonzero(self.owners != NOBODY)
        self.keeps[self.owners[chunks, columns], chunks] = True
        if job.copies is None:
            for keeps in self.keeps:
                keeps[np.flatnonzero(~keeps)[: job.room - int(keeps.sum())]] = True

    def epoch(self) -> Epoch:
        """Each chunk goes to `readers` nodes, and each node gets equally many."""
        job, counts = self.job, Epoch(*np.zeros((4, self.job.nodes)))
        first = self.random.permutation(job.chunks) % job.nodes
        for reader in range(job.readers):
            asker, chunks = (first + reader) % job.nodes, np.arange(job.chunks)
            here = self.has[asker, chunks]
            _count(counts.own, asker[here])
            asker, chunks = asker[~here], chunks[~here]
            owned = self.owners[chunks, 0] != NOBODY
            self._from_store(counts, asker[~owned], chunks[~owned])
            self._from_peers(counts, asker[owned], chunks[owned])
        return counts

    def _from_store(self, counts: Epoch, asker: Array, chunks: Array) -> None:
        """No other node is to keep these. The asker keeps what comes first."""
        _count(counts.store, asker)
        if not self.room.any():
            return
        order = np.argsort(asker, kind="stable")
        asker, chunks = asker[order], chunks[order]
        position = np.arange(len(asker)) - np.searchsorted(asker, asker)  # among the chunks of its node
        kept = position < self.room[asker]
        self.has[asker[kept], chunks[kept]] = True
        _count(self.room, asker[kept], -1)

    def _from_peers(self, counts: Epoch, asker: Array, chunks: Array) -> None:
        """The first owner brings a chunk from the store, once. Other owners ask it, the rest ask any owner."""
        responsible = self.owners[chunks, 0]
        new = ~self.has[responsible, chunks]
        _count(counts.store, responsible[new])
        self.has[responsible[new], chunks[new]] = True
        other = asker != responsible
        asker, chunks, responsible = asker[other], chunks[other], responsible[other]
        keeps = self.keeps[asker, chunks]
        owners = (self.owners[chunks] != NOBODY).sum(axis=1)
        source = self.owners[chunks, (asker + chunks) % owners]  # as Placement.sources
        source = np.where(keeps | ~self.has[source, chunks], responsible, source)
        _count(counts.came, asker)
        _count(counts.served, source)
        self.has[asker[keeps], chunks[keeps]] = True


def _count(where: Array, nodes: Array, step: int = 1) -> None:
    where += step * np.bincount(nodes, minlength=len(where))


@functools.cache
def simulate(job: Job, way: Way) -> tuple[Epoch, ...]:
    nodes = _Nodes(job, way)
    return tuple(nodes.epoch() for _ in range(job.epochs))


def store_passes(job: Job, epochs: Sequence[Epoch]) -> float:
    """Bytes read from the store ÷ the data."""
    return float(sum(epoch.store.sum() for epoch in epochs)) / job.chunks


def hot_spot(epochs: Sequence[Epoch]) -> float:
    """Bytes that the busiest node served ÷ the mean; 1 if none served any."""
    served = np.sum([epoch.served for epoch in epochs], axis=0)
    return float(served.max() / served.mean()) if served.any() else 1.0


def seconds(job: Job, rates: Rates, epoch: Epoch, data_bytes: float) -> float:
    """A lower bound for an epoch."""
    flows = (
        epoch.store.sum() / rates.store,
        (epoch.store + epoch.came).max() / rates.link,
        epoch.served.max() / min(rates.link, rates.serve),
        (epoch.own + epoch.served).max() / rates.tier,
    )
    read_s = float(max(flows)) * data_bytes / job.chunks
    compute_s = job.readers * data_bytes / job.nodes / rates.compute
    return max(read_s, compute_s) if rates.prefetch else read_s + compute_s
