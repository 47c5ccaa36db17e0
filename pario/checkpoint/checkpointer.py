"""pario.Checkpointer: `save` copies a tree and returns; threads write it; `restore` finds the newest complete one."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from pario.checkpoint import attempts
from pario.checkpoint.attempts import Attempt, Board, Budget, FastTier, Handle, Tier, Tiers
from pario.checkpoint.finding import Finder
from pario.checkpoint.flat import Alike, Flat, check_same, flatten, structure_of
from pario.checkpoint.layout import Staging
from pario.checkpoint.manifest import Manifest
from pario.checkpoint.partner import Partner, open_partner
from pario.checkpoint.restoring import restored
from pario.checkpoint.store import Claim, newest, open_folders, run_of, sweep
from pario.checkpoint.tree import Leaves
from pario.checkpoint.varying import Varying
from pario.checkpoint.writing import DrainThread, WriteThread
from pario.codec.library import own_version
from pario.comm.alive import roll_call
from pario.comm.base import together
from pario.comm.launcher import job_end
from pario.comm.world import get_world
from pario.errors import CheckpointError, ClosedError, OptionError, PeerError
from pario.notebook import shown
from pario.plane.bucket import Bucket
from pario.plane.joining import store_agent
from pario.threads import Workers, at_end

_log = logging.getLogger("pario")


class Checkpointer:
    """Saves trees of arrays in the background, and restores the newest complete one on any number of ranks.

    Parameters
    ----------
    comm : mpi4py communicator, "self" or None
        As for `pario.Loader`. A path here is `slow`: Checkpointer("/scratch/run1").
    slow : str or Path
        Folder on a store that all nodes see, made if it is missing; one job at a time saves into it.
    fast : str or Path, optional
        Folder on each node's own disk or memory, named alike. Checkpoints go there first, then drain to `slow`.
    keep : int or None
        Checkpoints that stay in `slow`; older ones are deleted when a newer one is complete. None: all.
    rate : float, optional
        Bytes per second that all nodes together write to `slow`. A control plane (PARIO_CONTROL) limits it further.
    full : "wait" or "slow"
        When the fast tier is full: wait for the drain, or write straight to `slow`, as where nothing is drained.
    pending : int
        Most checkpoints under way to `slow`; with more of them `save` waits.
    incremental : bool
        Take arrays over from the last checkpoint that this Checkpointer has written, where their checksums say that
        they have not changed: its file is a hard link in the new one's folder, so the older one may be deleted.
    compress : str, optional
        A codec of pario and its level, "zstd:3" or "lz4": it packs blocks. Plain h5py cannot read them then.
    partner : bool
        Copy each node's part to the fast tier of another node, so that its loss before the drain loses nothing. The
        fast tiers need room for twice as much.
    differing : "rank0" or "raise"
        For an array without Shard, or another value, that is not the same on all ranks: take that of rank 0, with a
        warning that names it once, or raise OptionError before anything is written. `PerRank` saves what differs.
        "rank0" compares all bytes in the first save of a structure; later a part of large arrays, another each time.
    timeout_s : float
        Seconds without a written byte after which a checkpoint is given up, and by which ranks of a node may be late.
    version : yours, a str: it is written into the manifest

    All methods are collective; where ranks come to different ones, all raise CheckpointError and are closed. What could
    not be saved in the background the next call reports, by CheckpointError on all ranks; saving may go on after it.
    """

    leaves: Leaves = Leaves()  #: what is an array; the checkpointers of pario/adapters know others
    _repr_html_ = shown

    def __init__(
        self,
        comm: Any = None,
        *,
        slow: str | os.PathLike[str] | None = None,
        fast: str | os.PathLike[str] | None = None,
        keep: int | None = 3,
        rate: float | None = None,
        full: str = "wait",
        pending: int = 2,
        incremental: bool = False,
        compress: str | None = None,
        partner: bool = False,
        differing: str = "rank0",
        timeout_s: float = 300.0,
        version: str = "",
    ) -> None:
        self._closed = True
        if slow is None and isinstance(comm, str | os.PathLike) and comm != "self":
            comm, slow = None, comm
        if slow is None:
            raise OptionError("a Checkpointer needs the folder in which it saves", hint="Checkpointer('/scratch/run1')")
        self._world = world = get_world(comm, "making a Checkpointer")
        self._stack = ExitStack()
        self.slow = os.path.abspath(slow)
        # Each run has a folder of its own there: what another one has left, or writes now, is none of its business.
        self.fast = None if fast is None else os.path.join(os.path.abspath(fast), run_of(self.slow))
        try:
            with together(world, "reading the options"):
                alone = bool(partner) and fast is None
                codec = attempts.check_options(keep, rate, full, pending, compress, differing, timeout_s, alone)
            self._keep, self._pending, self._timeout_s, self._version = keep, pending, timeout_s, str(version)
            mine = self.slow, fast is None, keep, rate, full, pending, incremental, compress, partner, differing
            self._secret, alike = world.bcast((secrets.token_hex(16), mine))
            with together(world, "comparing the options"):
                if alike != mine:
                    said = f"(slow, fast is None, keep, ...): rank 0 has {alike}, this one {mine}"
                    raise OptionError(f"options differ between ranks {said}")
            with together(world, "opening the checkpoints' folders"):
                open_folders(world, self.slow, self.fast)
            self._partners = bool(partner)
            self._board = Board(world, timeout_s)
            self._start(rate, full, Varying(world.node, self._board, bool(incremental), codec))
        except BaseException as e:
            self._stack.close()
            world.abandon(e)
            raise
        self._number = self._calls = 0
        self._structure: Any = None  # of the last tree
        self._staging = Staging(self.leaves)
        self._alike = Alike(world, self.leaves, differing == "raise")
        self._attempts: list[Attempt] = []  # whose end nobody has looked at
        self._budget = Budget()
        self._finder, self._claim = Finder(world, self.slow, self.fast), Claim(self.slow)
        self._stack.callback(self._claim.close)
        self._closed = False
        at_end(self._quit)

    def _start(self, rate: float | None, full: str, varying: Varying) -> None:
        world = self._world
        share = world.nodes if self.fast is not None else world.size
        bucket = Bucket((None if rate is None else rate / share, None))
        self._stack.callback(bucket.close)
        agent = self._stack.enter_context(store_agent())

        ask_plane = None if agent is None else lambda nbytes: agent.take(nbytes, 1)

        def take(nbytes: int) -> None:
            bucket.take(nbytes, 1)
            if ask_plane is not None:
                ask_plane(nbytes)

        self._ask_plane = ask_plane
        fast = None if self.fast is None else FastTier(self.fast, self.slow, self._partners and world.nodes > 1)
        tiers = Tiers(self.slow, fast, full, self._timeout_s, self._keep, take)
        threads = Workers("pario-checkpoint", 0)
        self._drain = DrainThread(world, tiers, self._board, threads)
        self._partner = open_partner(world, tiers, self._board, threads) if self._partners else None
        if self._partner is not None:
            self._stack.callback(self._partner.close)

        # No circle: the memory that ranks share goes back with the last reference, not when the collector comes.
        partner, drain = self._partner, self._drain
        def then(attempt: Attempt, straight: bool) -> None:
            if partner is not None:
                partner.submit(attempt, straight)
            else:
                attempt.uncopied = True
                attempt.copied.set()
            drain.submit(attempt, straight)

        self._writer = WriteThread(world, tiers, self._board, varying, then, threads)

    # -- saving --------------------------------------------------------------------------------------------------------

    def save(self, step: int, tree: Any) -> Handle:
        """Copy the tree and return; it is written in the background. Later changes of the arrays are not saved.

        step : 0 or more, the same on all ranks
        tree : dicts, lists and tuples of arrays, `Shard`, `PerRank`, numbers, str, bytes, None; the same structure on
            all ranks. Arrays that are no Shard, and other values, are to be alike on all ranks: see `differing`.

        It goes on from the checkpoint that was restored or saved before, and is the newest one then, whatever its step;
        a warning names the steps that this leaves behind. Waits while an earlier one is still in staging memory, or
        `pending` others are under way. Raises OptionError for what cannot be saved, CheckpointError for an earlier
        checkpoint that could not be saved, and ParioError if there is no memory for the copy.
        """
        began = time.monotonic()
        self._roll_call("saving a checkpoint")
        error: BaseException | None = attempts.step_error(step)
        flat = Flat(None, [], [], [], [])
        try:
            flat = flatten(tree, self.leaves)
        except Exception as e:
            error = error or e
        self._meet(error, "saving a checkpoint")
        if self._number == 0:
            self._meet(self._claim.take() if self._world.rank == 0 else None, "saving a checkpoint")
            sweep(self._world, self.slow, self.fast)
        structure = structure_of(flat)
        anew = bool(self._world.allreduce_max(structure != self._structure))
        self._structure = None if anew else structure
        flat, anew = self._alike.check(int(step), flat, anew)
        if anew:
            self._structure = None
            late = self._held_up(lambda: all(attempt.written.is_set() for attempt in self._attempts))
            self._meet(late, "saving a checkpoint")
            self._staging.lay_out(self._world, flat, self._alike.owners)
            self._board.fit(len(self._staging.file.blocks))
            self._structure = structure
        self._room()
        manifest, staging = self._manifest(int(step), flat), self._staging
        # Nobody writes before all have copied: threads that read the memory, too, made a copy take twice as long.
        with together(self._world, "copying what is saved"):
            staging.copy(flat)
        self._number += 1
        attempt = Attempt(self._number, manifest, staging.file, staging.memory, began)
        self._attempts.append(attempt)
        self._writer.submit(attempt)
        return Handle(attempt, time.monotonic() - began, self._wait)

    def _manifest(self, step: int, flat: Flat) -> Manifest:
        world = self._world
        random = hashlib.sha256(f"{self._secret} {self._number}".encode()).hexdigest()[:8]
        id_, parents = self._finder.next(step, random)
        return Manifest(
            step, id_, time.time(), world.size, world.nodes, own_version(), self._version, flat.description,
            flat.specs, [""] * world.nodes, parents, bool(flat.own),
        )  # fmt: skip

    def _room(self) -> None:
        """Wait until the staging memory is free and fewer than `pending` checkpoints are under way."""
        self._budget.learn(self._attempts)
        self._attempts = [one for one in self._attempts if one.error is not None or not one.drained.is_set()]
        began = time.monotonic()

        def is_free() -> bool:
            written = all(attempt.written.is_set() for attempt in self._attempts)
            return written and self._number - self._board.get(attempts.DRAINED) < self._pending

        self._meet(self._held_up(is_free), "saving a checkpoint")
        waited = time.monotonic() - began
        if waited > 0.1:
            _log.warning("save waited %.1f s: checkpoints are written more slowly than they are made", waited)

    def _held_up(self, ready: Callable[[], bool]) -> Exception | None:
        """As `_until`. The others, who may come to the next call meanwhile, do not take this rank for late."""
        self._board.mine(attempts.BUSY, self._calls + 1)
        late = self._until(ready)
        self._board.mine(attempts.BUSY, 0)
        return late

    def _until(self, ready: Callable[[], bool], timeout_s: float | None = None) -> Exception | None:
        """Wait for this rank's threads; what is wrong if it is not `ready` in time. Raises PeerError, DeadRankError."""
        began = looked = moved_at = time.monotonic()
        pause, moved = 1e-4, self._board.movement()
        while not ready():
            now = time.monotonic()
            if timeout_s is not None and now - began > timeout_s:
                return TimeoutError()
            if now - looked > min(0.2, self._timeout_s):
                looked = now
                self._world.alarm.check()
                self._world.check_alive()
                if moved != (moved := self._board.movement()):
                    moved_at = now
                if now - moved_at > 2 * self._timeout_s:  # the threads themselves give up earlier, if they can
                    what = f"no byte was written for {now - moved_at:.0f} s, and the store does not answer"
                    return CheckpointError(what, path=self.slow if self.fast is None else self.fast)
            time.sleep(pause)
            pause = min(2 * pause, 5e-3)
        return None

    def _wait(self, attempt: Attempt, tier: str, timeout_s: float | None) -> None:
        if tier == "partner" and not self._partners:
            raise OptionError('waiting for "partner" needs Checkpointer(..., partner=True)')
        doing = f"waiting for the checkpoint of step {attempt.manifest.step}"
        if not self._closed:
            self._roll_call(doing)
            end = None if timeout_s is None else time.monotonic() + timeout_s
            on_slow = tier == "slow" or self.fast is None
            late = None if on_slow else self._until(attempt.written.is_set, timeout_s)
            left = lambda: None if end is None else max(0.0, end - time.monotonic())  # noqa: E731
            if tier == "partner" and not on_slow:
                late = late or self._until(attempt.copied.is_set, left())
            not_there = attempt.straight or (tier == "partner" and attempt.uncopied)
            if on_slow or self._world.allreduce_max(not_there):  # on any node: then it is the slow tier that counts
                late = late or self._until(attempt.committed.is_set, left())
            if isinstance(late, TimeoutError):
                late = TimeoutError(f"step {attempt.manifest.step} is not complete after {timeout_s} s")
            self._meet(attempt.error or late, doing)
        elif attempt.error is not None:
            raise attempt.error
        elif not attempt.committed.is_set():
            raise CheckpointError(f"the checkpoint of step {attempt.manifest.step} was given up when the script ended")

    def _roll_call(self, doing: str, *, warns: bool = False) -> None:
        """All ranks come to the same call. Collective. Else everything ends: CheckpointError on all ranks if they come
        to different ones, and on this one if one of its node does not come within the time limit, or one of another
        node in three times that (PeerError on the others); warns : a warning in place of the latter."""
        if self._closed:
            raise ClosedError("this Checkpointer was closed")
        self._calls += 1
        self._board.mine(attempts.CALLED, self._calls)
        told, code = False, zlib.crc32(doing.encode())
        error: BaseException | None = None

        def check(waited: float) -> None:
            nonlocal told
            late = self._board.late(self._calls) if waited > self._timeout_s else []
            if told or not (late or (self._world.nodes > 1 and waited > 3 * self._timeout_s)):
                return
            who = ", ".join(f"rank {rank}" for rank in late) or "a rank of another node"
            said = f"{who} did not come within {waited:.0f} s while rank {self._world.rank} is {doing}"
            if not warns:
                raise CheckpointError(said, hint=f"{attempts.ALIKE}; or raise timeout_s")
            told = True
            _log.warning("%s. %s", said, attempts.ALIKE)

        try:
            with roll_call(self._world, doing, check):
                if self._world.allreduce_min(code) != self._world.allreduce_max(code):
                    error = self._world.raised_by_all(attempts.apart(self._world.allgather(doing)))
        except CheckpointError as e:
            error = e
        if error is not None:
            self.__exit__(type(error), error, None)
            raise error

    def _meet(self, error: BaseException | None, doing: str) -> None:
        """All ranks continue, or all raise: `error`, or what went wrong in the background. Collective."""
        if error is None:
            error = next((attempt.error for attempt in self._attempts if attempt.error is not None), None)
        mine = 2 if isinstance(error, CheckpointError) else 1 if isinstance(error, TimeoutError) else 0
        worst = self._world.allreduce_max(mine)
        try:
            self._world.agree(error, doing)
        except PeerError as e:
            # A script that goes on after one of these does so on all ranks.
            if worst == 2:
                raise CheckpointError(str(e)) from e
            if worst == 1:
                raise TimeoutError(str(e)) from e
            raise
        finally:
            self._attempts = [one for one in self._attempts if one.error is None or one.error is not error]  # reported

    # -- before the end ------------------------------------------------------------------------------------------------

    def seconds_needed(self, tier: Tier = "slow") -> float:
        """Seconds until a checkpoint that `save` begins now would be durable on that tier ("fast": the one that is
        written to first), after what is under way. Collective; the same on all ranks.

        It is half as much again as the longest of the last five of this Checkpointer took; 0.0 before the first one is
        durable.
        """
        self._roll_call("asking how long a checkpoint takes")
        if tier not in ("fast", "slow"):
            raise self._world.raised_by_all(OptionError(f'tier must be "fast" or "slow", got {tier!r}'))
        known = self._budget.seconds(self._attempts, "slow" if self.fast is None else tier, time.monotonic())
        return self._world.allreduce_max(round(max(0.0, known) * 1e6)) / 1e6

    def must_save(self, end: float | None = None, *, tier: Tier = "slow", margin_s: float = 10.0) -> bool:
        """Whether a checkpoint must begin now in order to be durable on that tier when the job ends. Collective; the
        same on all ranks. Call it once per step: the next chance to save is one step later.

        end : when the job ends, in seconds since 1970, as time.time() counts them. None: as the scheduler says
            (SLURM_JOB_END_TIME); where it does not, the answer is False
        margin_s : seconds that the script needs afterwards

        True if less time is left than `seconds_needed(tier)`, the longest of the last ten intervals between calls, and
        `margin_s` together. Before a checkpoint is durable, nothing is known of how long one takes: save one early.
        """
        step_s = self._budget.step(time.monotonic())
        needed = self.seconds_needed(tier)
        end = job_end() if end is None else end
        late = end is not None and time.time() + needed + step_s + margin_s >= end
        return bool(self._world.allreduce_max(late))

    # -- restoring -----------------------------------------------------------------------------------------------------

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint, the one that was saved last, or None. Collective."""
        self._roll_call("looking for checkpoints")
        self._meet(None, "looking for checkpoints")
        return next((found.step for found in self._finder.find()), None)

    def restore(self, step: int | None = None, like: Any = None) -> Any:
        """The tree of the newest complete checkpoint, or of that step. Collective; on any number of ranks.

        step : the same on all ranks; None: the newest
        like : a tree that says what is wanted: whole arrays where it has arrays, this rank's part where it has a
            `Shard`; what it leaves out is not read. None: the whole tree, with whole arrays.

        Every block that is read is checked; where one is damaged an older checkpoint is taken, with a warning, unless
        `step` is given. Raises MissingError if there is none, StateError if `like` does not fit, and the error of the
        newest if all are damaged.
        """
        self._roll_call("restoring a checkpoint")
        # What is drained or copied now may be deleted from the fast tier while it is read there.
        drained = lambda: all(attempt.drained.is_set() for attempt in self._attempts)  # noqa: E731
        copied = lambda: self._partner is None or self._partner.idle  # noqa: E731
        error: Exception | None = None if step is None else attempts.step_error(step)
        self._meet(error or self._held_up(lambda: drained() and copied()), "restoring a checkpoint")
        check_same(self._world, -1 if step is None else int(step), "step")
        tree, parents = restored(self._world, self._finder, step, like, self.leaves, self._ask_plane)
        self._finder.restored(parents)
        return tree

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait until everything that was saved is on the slow store, and end. Collective, idempotent.

        Raises CheckpointError if something could not be saved; everything is closed then, too.
        """
        if self._closed:
            return
        try:
            late = self._held_up(lambda: all(attempt.drained.is_set() for attempt in self._attempts))
            self._roll_call("closing a checkpointer", warns=True)  # all is saved: nothing is lost by waiting
            self._meet(late, "closing a checkpointer")
        except BaseException as e:
            if not self._closed:
                self._end(e)
            raise
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        self._closed = True
        _close_all(_END_S, self._writer, self._drain, self._partner)
        self._stack.close()
        # The memory that ranks share goes back now; a thread that has not ended has references of its own.
        del self._board, self._staging, self._writer, self._drain, self._partner
        self._attempts = []
        if error is None:
            self._world.close()
        else:
            self._world.abandon(error)

    def _quit(self) -> None:
        """The script has ended: what was copied may still get to its tier. Calls no MPI."""
        if not self._closed:
            self._closed = True
            _await_drained(self._attempts, _END_S)
            _close_all(0, self._writer, self._drain, self._partner)
            self._claim.close()

    def __repr__(self) -> str:
        return f"Checkpointer({newest(self.slow, self.fast)})"

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):  # a deliberate end
            self.close()
        elif not self._closed:
            # Each rank for itself: what was copied may still get to its tier.
            _await_drained(self._attempts, _GRACE_S)
            self._end(error)


#: Seconds that threads get to end after close, and what is under way when the script has failed.
_END_S, _GRACE_S = 5.0, 10.0


def _close_all(limit_s: float, *lines: WriteThread | DrainThread | Partner | None) -> None:
    for line in lines:
        if line is not None:
            line.close(limit_s)


def _await_drained(attempts: list[Attempt], limit_s: float) -> None:
    """Wait for them, at most this many seconds."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end and not all(attempt.drained.is_set() for attempt in attempts):
        time.sleep(0.01)
