"""A loader's part in the trace of its process: what it tells about itself, and when the file is written."""

from __future__ import annotations

import logging
from typing import Any

from pario.comm.base import AnyWorld
from pario.dataset.reader import Reader
from pario.errors import ParioError
from pario.loader.arguments import Arguments
from pario.loader.meeting import Meeting
from pario.stats.trace import Recorder, Use
from pario.stats.trace_file import merge_parts, write_part

_log = logging.getLogger("pario")


class LoaderTrace:
    """Not collective. Errors become warnings: a full disk for a trace must not end the training."""

    def __init__(self, recorder: Recorder, world: AnyWorld, reader: Reader, given: Arguments, meeting: Meeting) -> None:
        self._recorder = recorder
        self._so_far = meeting.so_far
        self._is_last = False
        knobs = reader.file.knobs

        def gauges() -> dict[str, float]:
            found: dict[str, float] = {name: each["value"] for name, each in knobs.published().items()}
            if reader.stage is not None:
                for tier in reader.stage.tiers:
                    found[f"bytes in {tier.name}"] = float(tier.held().sum()) * tier.grid.chunk_bytes
            return found

        self._merges = world.rank == 0 and world.size == recorder.size > 1
        recorder.add(Use(reader.path, _described(given), self._so_far), gauges)

    def close(self) -> None:
        """The loader closes, or an error has ended it: write this rank's part, if none of its loaders is open."""
        try:
            self._is_last = self._recorder.leave(self._so_far)
            if self._is_last:
                write_part(self._recorder)
        except Exception as e:
            _log.warning("the trace is not written: %s", e)

    def merge(self) -> None:
        """All ranks have written their parts: rank 0 makes one file of them."""
        if self._merges and self._is_last:
            try:
                missing = merge_parts(self._recorder.path, self._recorder.size)
            except (OSError, ParioError) as e:
                _log.warning("the parts of the trace %s are not merged: %s", self._recorder.path, e)
                return
            if missing:
                _log.warning(
                    "the trace %s lacks rank %s, whose part rank 0 does not see: name a folder that all nodes share, "
                    "or merge the parts by `python -m pario trace --merge`",
                    self._recorder.path,
                    ", ".join(map(str, missing)),
                )


def _described(given: Arguments) -> dict[str, Any]:
    """What the advice needs to know."""
    options = given.options
    return {
        "shuffle": str(given.shuffle or "none"),
        "batch_size": str(given.batch_size),
        "slot_bytes": options.slot_bytes,
        "gap_bytes": options.gap_bytes,
        "inflight": str(options.inflight),
    }
