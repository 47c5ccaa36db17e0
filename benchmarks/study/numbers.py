"""Medians with their spread, ratios pair by pair, and figures with a bar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.drawing import spread

__all__ = ["Row", "ratios", "spread"]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Median and spread of the ratios of pairs that were measured one after the other."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


@dataclass
class Row:
    """One line of a section: a case, its figure and its bar."""

    case: str
    figure: float  # the median; what the bar is compared with
    low: float
    high: float
    sense: str = ""  # ">=" or "<="; empty: for information
    bar: float | None = None
    unit: str = "×"
    ours: str = ""  # what pario did, in words with units
    theirs: str = ""  # what it is compared with
    met: bool | None = None

    def __post_init__(self) -> None:
        if self.bar is not None:
            self.met = self.figure >= self.bar if self.sense == ">=" else self.figure <= self.bar

    def line(self) -> str:
        verdict = {True: "met", False: "NOT MET", None: ""}[self.met]
        bar = f" (bar {self.sense} {self.bar:g})" if self.bar is not None else ""
        tail = "; ".join(part for part in (self.ours, self.theirs) if part)
        span = f"[{self.low:.3f} .. {self.high:.3f}]"
        return f"  {verdict:8}{self.case}: {self.figure:.3f} {self.unit} {span}{bar}  {tail}"
