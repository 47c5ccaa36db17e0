"""Find the model's free parameters, on the published points of at most 1,152 ranks and on nothing else.

Two steps.

A. What one published figure or a few of them say directly, each in closed form (`direct`): the node's link, its seconds
   per call and per fault from the bandwidths of one client; the seconds per cursor step from DIO less PROV.
B. A search (`search`) for the storage: six parameters, of which two are integers. For each trial the reading of all
   recipes is simulated; the four parameters that the times are linear in (computing, crowding, exchange, wake-ups) are
   then solved for by least squares. Objective: root of the mean square of log(model / paper) over 28 training times and
   one IOR figure. The trials are a Sobol sequence over the ranges in `RANGES`, and its best are refined by the simplex
   method of Nelder and Mead. Nothing is random from run to run.

Among all trials those that fit almost as well as the best one (`ALMOST`) are kept: what they predict differently is the
uncertainty that the points of at most 1,152 ranks leave.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.model import paper
from benchmarks.model.engine import Machine
from benchmarks.model.recipes import Training, Workload, ior, reading_s

__all__ = ["BEBOP", "STORED", "Fit", "bebop", "calibration_ranks", "direct", "load", "search", "training_s"]

STORED = Path(__file__).with_name("calibrated.json")
ALMOST = 1.25  # trials with at most this times the best one's objective fit about equally well
KEPT = 4  # of them, those that differ most
TRIALS = 64  # of the Sobol sequence
STEPS = 20  # simplex evaluations of the best trial of each block size

#: Storage parameter -> lowest and highest value tried; the logarithm is spread evenly. The last two are integers.
RANGES = {
    "disk_rate": (150e6, 600e6),
    "net_rate": (300e6, 1500e6),
    "request_s": (0.2e-3, 4e-3),
    "seek_s": (3e-3, 40e-3),
    "block": (1 << 20, 8 << 20),  # powers of two
    "ahead": (2, 8),
}
#: The four that each trial solves for, and where the solver begins.
LINEAR = {"compute_s": 26_000.0, "crowded": 1.5, "exchange_s": 0.5e-3, "wake_s": 10e-6}
#: Streams that a server knows: the calibration points say only that they are no fewer than the readers of 1,152 ranks.
SEGMENTS = 32

#: Blocks under way for one read call: not to be told from these points either (a GPFS client has 72 threads for it).
DEPTH = 32

BEBOP = Machine(servers=10, segments=SEGMENTS, depth=DEPTH)


@dataclass(frozen=True)
class Fit:
    """A parameter set and its objective."""

    machine: Machine
    training: Training
    rms: float

    def as_json(self) -> dict[str, Any]:
        return {"rms": self.rms, "machine": asdict(self.machine), "training": asdict(self.training)}


def bebop(ranks: int) -> Workload:
    return Workload(ranks, max(1, ranks // paper.PROCESSES_PER_NODE), paper.BATCH, paper.ITERATIONS, paper.RECORD)


def calibration_ranks() -> list[int]:
    return [ranks for ranks in paper.TRAINING if ranks <= paper.CALIBRATION_RANKS]


def training_s(fit: Fit, ranks: int, recipe: str) -> float:
    """Seconds of a training run on Bebop."""
    work = bebop(ranks)
    return fit.training.seconds(work) + reading_s(fit.machine, work, recipe)


def direct() -> dict[str, float]:
    """Step A: parameters that few points determine at once."""
    # seconds of a call = call_s + bytes / link_rate; relative errors of the bandwidth are what is minimised
    sizes = np.array(list(paper.PREAD), dtype=float)
    seconds = sizes / (np.array(list(paper.PREAD.values())) * 1e6)
    columns = np.stack([np.ones_like(sizes), sizes], axis=1) / seconds[:, None]
    call_s, byte_s = np.linalg.lstsq(columns, np.ones_like(sizes), rcond=None)[0]
    mapped = 4096 / (paper.MMAP[4096] * 1e6)
    walked = [
        paper.TRAINING[ranks][paper.NAMES.index("dio")] - paper.TRAINING[ranks][paper.NAMES.index("prov")]
        for ranks in calibration_ranks()
        if ranks > 1  # of 26,000 seconds the difference cannot be told
    ]
    return {
        "call_s": float(call_s),
        "link_rate": float(1 / byte_s),
        "fault_s": float(mapped - 4096 * byte_s),
        "next_s": float(np.mean(walked)) / (paper.BATCH * paper.ITERATIONS),
    }


def blues(machine: Machine) -> Machine:
    """The same storage before the nodes of Blues: their link takes what IOR got there on one rank."""
    return replace(machine, link_rate=paper.IOR_BLUES[1] * 1e6)


def _unit(point: Iterable[float]) -> dict[str, Any]:
    """A point of the unit cube as storage parameters."""
    chosen: dict[str, Any] = {}
    for (name, (low, high)), x in zip(RANGES.items(), np.clip(list(point), 0, 1 - 1e-9), strict=True):
        if name == "block":
            steps = round(math.log2(high / low)) + 1
            chosen[name] = int(low) << int(x * steps)
        elif name == "ahead":
            chosen[name] = int(low) + int(x * (high - low + 1))
        else:
            chosen[name] = float(low * (high / low) ** x)
    return chosen


def solve(machine: Machine) -> Fit:
    """Simulate all calibration points with a storage, then solve for the linear parameters."""
    from scipy.optimize import least_squares

    without = replace(machine, wake_s=0.0)
    rows = []  # seconds in the paper, and the coefficients of what the model says
    for ranks in calibration_ranks():
        work = bebop(ranks)
        faults = work.bytes / work.nodes / 4096
        for recipe, seconds in zip(paper.NAMES, paper.TRAINING[ranks], strict=True):
            woken = faults * (work.ranks / work.nodes - 1) if recipe == "lmdb" else 0.0
            crowded = work.ranks > work.nodes
            exchanges = math.log2(ranks) * work.iterations
            rows.append((seconds, reading_s(without, work, recipe), woken, 1 / ranks, crowded, exchanges))
    paper_s, read, woken, share, crowded, exchanges = map(np.array, zip(*rows, strict=True))

    def errors(logs: np.ndarray) -> np.ndarray:
        compute, crowd, exchange, wake = np.exp(logs)
        model = read + wake * woken + compute * share * np.where(crowded, crowd, 1) + exchange * exchanges
        return np.log(model / paper_s)

    found = least_squares(errors, np.log(list(LINEAR.values())))
    compute_s, crowd, exchange_s, wake_s = map(float, np.exp(found.x))
    last = math.log(ior(blues(machine), 32, 16) / (paper.IOR_BLUES[512] * 1e6))
    all_errors = [*found.fun, last]
    training = Training(compute_s, crowd, exchange_s)
    return Fit(replace(machine, wake_s=wake_s), training, float(np.sqrt(np.mean(np.square(all_errors)))))


def _try(point: tuple[float, ...], segments: int = SEGMENTS) -> Fit:
    return solve(replace(BEBOP, segments=segments, **direct(), **_unit(point)))


def _refine(point: tuple[float, ...]) -> list[Fit]:
    """Nelder and Mead from a point; the integers stay."""
    from scipy.optimize import minimize

    continuous = len(RANGES) - 2
    seen: list[Fit] = []

    def objective(x: np.ndarray) -> float:
        if x.min() < 0 or x.max() > 1:
            return 10.0
        seen.append(_try((*x, *point[continuous:])))
        return seen[-1].rms

    begin = np.array(point[:continuous])
    corners = begin + 0.08 * np.vstack([np.zeros(continuous), np.diag(np.where(begin > 0.9, -1.0, 1.0))])
    minimize(objective, begin, method="Nelder-Mead", options={"maxfev": STEPS, "initial_simplex": corners})
    return seen


def search(workers: int = 2) -> list[Fit]:
    """Step B: the best parameter set, and after it others that fit almost as well and differ most from each other."""
    from scipy.stats import qmc

    points = [tuple(map(float, point)) for point in qmc.Sobol(len(RANGES), seed=0).random(TRIALS)]
    with ProcessPoolExecutor(workers) as pool:
        fits = list(pool.map(_try, points, chunksize=4))
        best: dict[int, int] = {}  # block size -> trial
        for i in sorted(range(TRIALS), key=lambda i: fits[i].rms):
            best.setdefault(fits[i].machine.block, i)
        for refined in pool.map(_refine, [points[i] for i in best.values()]):
            fits += refined
    fits.sort(key=lambda fit: fit.rms)
    return _unlike([fit for fit in fits if fit.rms <= ALMOST * fits[0].rms])


def _unlike(fits: list[Fit]) -> list[Fit]:
    """The first, and again and again the one farthest from those taken, by the logarithms of its storage parameters."""
    places = np.array([[math.log(getattr(fit.machine, name)) for name in RANGES] for fit in fits])
    spans = np.array([math.log(high / low) for low, high in RANGES.values()])
    taken = [0]
    while len(taken) < min(KEPT, len(fits)):
        apart = np.abs((places[:, None] - places[taken]) / spans).sum(axis=2).min(axis=1)
        taken.append(int(apart.argmax()))
    return [fits[i] for i in [0, *sorted(taken[1:], key=lambda i: fits[i].rms)]]


def load(path: Path = STORED) -> list[Fit]:
    """The stored parameter sets, the best one first."""
    stored = json.loads(path.read_text())
    return [Fit(Machine(**fit["machine"]), Training(**fit["training"]), fit["rms"]) for fit in stored["fits"]]
