"""All knobs of a rank in one place: their bounds, from the options, and what is published of them."""

from __future__ import annotations

from typing import Any

from pario.options import KNOBS, Options
from pario.tune.decoding import DecodeTuner
from pario.tune.knobs import Knob


class Knobs:
    """All knobs of one rank, by the names of their options (`pario.options.KNOBS`).

    reads : this rank reads for its node, so that the knobs of reading act
    """

    def __init__(self, options: Options, *, reads: bool) -> None:
        self._options = options
        self._knobs: dict[str, Knob] = {}
        for name in KNOBS:
            self._make(name)
        #: turns the two of decoding
        self.decoding = DecodeTuner(self["decode_threads"], self["decode_ahead"], 1)
        self._acting = {"inflight"} if reads else set()

    def __getitem__(self, name: str) -> Knob:
        return self._knobs[name]

    def decode(self, cores: int) -> None:
        """This rank decodes record by record, and may use this many cores."""
        self._make("decode_threads", most=cores, start=cores)
        self.decoding = DecodeTuner(self["decode_threads"], self["decode_ahead"], cores)
        self._acting |= {"decode_threads", "decode_ahead"}

    def prepare(self) -> None:
        """Batches of this rank are decoded by one call each: if they are prepared ahead, only that knob turns."""
        self.decoding = DecodeTuner(Knob("threads that decode", 1, 1, 1), self["decode_ahead"], 1)

    def acts(self, name: str) -> None:
        """From now on this knob acts on this rank."""
        self._acting.add(name)

    def published(self) -> dict[str, dict[str, Any]]:
        """Of the knobs that act on this rank: name -> value, reason, least, most, and whether it is pinned."""
        found = {}
        for name in self._knobs:
            if name in self._acting:
                knob = self._knobs[name]
                value, reason = knob.setting
                found[name] = {
                    **{"value": value, "reason": reason, "least": knob.least, "most": knob.most},
                    "pinned": self._options.bounds(name) is not None and knob.is_pinned,
                }
        return found

    def _make(self, name: str, *, most: int | None = None, start: int | None = None) -> None:
        turns, given = KNOBS[name], self._options.bounds(name)
        start = turns.start if start is None else start
        if given is not None:
            self._knobs[name] = Knob(turns.words, *given, start)
        else:
            most = turns.most if most is None else max(turns.least, most)
            reason = "there is no more" if turns.least == most else ""
            self._knobs[name] = Knob(turns.words, turns.least, most, start, reason)
