"""The usual supply: a seat or the ring, as choose.py says for each node and epoch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pario.dataset.reader import renew_tiers
from pario.feed.choose import Way, choose
from pario.feed.source import Ahead, Context, Source, Supply
from pario.plan.stream import Work
from pario.threads import Workers

if TYPE_CHECKING:  # loaded for the way that an epoch takes
    from pario.feed.next_epoch import ContinuingWriter
    from pario.feed.ring_writer import RingWriter


class Automatic(Supply):
    """A seat or the ring: decided for each node before each epoch."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        # Decoders that work record by record have threads of their own: those that prepare batches wait for bytes and
        # for decoders. A second one takes the records of the next batch meanwhile, if there is a core for it. Others
        # do all the work themselves.
        self._decodes_apart = context.decode.decoder.parallel
        threads = min(2 if self._decodes_apart else context.options.usual_inflight, context.share.threads)
        self._preparer = Workers("pario-ahead", threads)
        self._writer: ContinuingWriter | None = None
        self._base = 0  # number in the ring of the next epoch's first group
        self._count_stage()

    def _count_stage(self) -> None:
        stage, stats = self.context.reader.stage, self.context.stats
        stats.staged = stage is not None
        if stage is not None:
            stage.stats = stats

    def propose(self) -> str:
        return choose(self.context.reader).value

    def renew(self) -> None:
        renew_tiers(self.context.reader)
        self._count_stage()

    def settle(self, work: Work | None = None, way: str = "") -> None:
        if self._writer is not None:
            following = self._writer.following
            if way != Way.RING or not work or not following or following.begins_at != (work.epoch, work.start):
                self._writer.go_no_further()
                following = None
            self._writer = following
        # Before any rank of the node begins: none must find that nothing is on its way yet.
        stage = self.context.reader.stage
        if stage is not None and stage.memory is not None:
            stage.memory.announce(True)

    def needs_ring(self, way: str) -> bool:
        return way != Way.SEAT

    def source(self, work: Work, way: str) -> Source:
        """Not collective."""
        context, stage = self.context, self.context.reader.stage
        # On a shared file ranks wait for chunks that the node's first rank has to announce before.
        self.is_prepared = way == Way.SEAT and bool(stage and stage.local)
        if way == Way.SEAT:
            from pario.feed.seat import Seat

            return Seat(context, work, self._preparer, own_kernels=context.decode.decoder.users.copies)
        from pario.feed.next_epoch import ContinuingWriter
        from pario.feed.ring_reader import RingReader

        known, base = context.reader.index.sizes_known, self._base
        self._base = (base + work.schedule.groups) % context.ring.slots
        writer: RingWriter | None = None
        if context.world.is_leader:
            if known:
                writer = self._writer = self._writer or ContinuingWriter(context, work, base, self._follow)
            else:
                from pario.feed.first_epoch import FirstEpochWriter

                writer = FirstEpochWriter(context, work, base)
            writer.start()
        ahead = Ahead(self._preparer.call, context.decode.tuner.ahead) if self._decodes_apart else None
        return RingReader(context, work, writer, spills=not known, ahead=ahead, base=base)

    def _follow(self, writer: ContinuingWriter) -> ContinuingWriter | None:
        """What reads the first groups of the next epoch, if that takes this way again."""
        if self.context.options.once or choose(self.context.reader) != Way.RING:
            return None
        from pario.feed.next_epoch import ContinuingWriter

        return ContinuingWriter(self.context, writer.next_work, writer.next_base, self._follow, writer)

    def no_more(self, limit_s: float = math.inf) -> bool:
        writer, self._writer = self._writer, None
        return writer is None or writer.go_no_further(limit_s)

    def stats(self) -> dict[str, Any]:
        stage = self.context.reader.stage
        return {} if stage is None else stage.state()

    def close(self, limit_s: float = math.inf) -> bool:
        ended = self.no_more(limit_s)
        return self._preparer.close(limit_s if ended else 0, cancel=True) and ended
