"""Which checkpoints there are: rank 0 looks at the slow store, each node's first rank at its fast tier, and rank 0's
answer counts for all. (On a parallel file system two ranks that look at the same moment may see different things.)"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from pario.checkpoint.manifest import MANIFEST, Manifest, Part, check_parts, part_name, read_manifest, read_part, sum_of
from pario.checkpoint.store import Name, listed, read_small
from pario.comm.base import AnyWorld, together
from pario.errors import ChecksumError, CorruptedError

__all__ = ["Finder", "Found", "Opened", "open_found"]

_log = logging.getLogger("pario")


class Found(NamedTuple):
    """A complete checkpoint, by its names alone. fast : on the fast tiers of the nodes; nodes : that have written it;
    copies : nodes of which a partner's copy is taken"""

    step: int
    at: float
    fast: bool
    id: str
    nodes: int
    copies: tuple[int, ...] = ()

    @property
    def words(self) -> str:
        more = f" with partner copies of {_nodes(self.copies)}" if self.copies else ""
        return f"step {self.step} on the {'fast' if self.fast else 'slow'} tier{more}"


class Opened(NamedTuple):
    """where : per node of the world, part -> the folder in which that node finds it"""

    manifest: Manifest
    parts: list[Part]
    where: list[dict[int, str]]


class Finder:
    """Looks for checkpoints, and warns once of a newer one whose parts are not all there."""

    def __init__(self, world: AnyWorld, slow: str, fast: str | None) -> None:
        self._world, self._slow, self._fast = world, slow, fast
        self._told = False

    def find(self) -> list[Found]:
        """As `find`. Collective."""
        tell, self._told = not self._told, True
        return find(self._world, self._slow, self._fast, tell)


def find(world: AnyWorld, slow: str, fast: str | None, tell: bool) -> list[Found]:
    """All complete checkpoints, newest step first; of one step the later one, and the fast tier, first. Where some
    parts are there twice, the one with fewer partner copies comes before the one that is made of all of them.
    Collective. Raises ReadError on all ranks.

    tell : warn of a newer one whose parts are not all there
    """
    own: list[Name] = []
    with together(world, "looking for checkpoints"):
        if fast is not None and world.is_leader:
            own = [name for name in listed(fast) if name.nodes]
    everyones = world.allgather(own) if fast is not None else [own]
    found: list[Found] = []
    with together(world, "looking for checkpoints"):
        if world.rank == 0:
            parts: dict[tuple[int, str, int], tuple[set[int], set[int]]] = {}  # own ones, copies
            for name in (name for names in everyones for name in names):
                parts.setdefault((name.step, name.id, name.nodes), (set(), set()))[name.copy].add(name.node)
            times = {name: _time(os.path.join(slow, str(name))) for name in listed(slow) if not name.nodes}
            found = [Found(name.step, at, False, name.id, 0) for name, at in times.items()]
            ages = {(each.step, each.id): each.at for each in found}
            for (step, id_, nodes), (whole, copies) in parts.items():
                if whole | copies == set(range(nodes)):
                    at = ages.get((step, id_), float("inf"))  # not drained yet: nothing of this step is newer
                    for taken in {tuple(sorted(copies - whole)), tuple(sorted(copies))}:
                        found.append(Found(step, at, True, id_, nodes, taken))
            found.sort(key=lambda each: (each[:5], -len(each.copies)), reverse=True)
            if tell:
                _tell_of_lost({key: whole | copies for key, (whole, copies) in parts.items()}, found)
    return world.bcast(found)  # type: ignore[no-any-return]


def _tell_of_lost(parts: dict[tuple[int, str, int], set[int]], found: list[Found]) -> None:
    """Of the newest checkpoint, if some nodes' parts are missing."""
    newest = found[0].step if found else -1
    step, id_, nodes = max(parts, default=(-1, "", 0))
    missing = sorted(set(range(nodes)) - parts.get((step, id_, nodes), set()))
    if step > newest and missing:
        older = f"step {newest} is the newest complete one" if found else "there is no complete one"
        _log.warning(
            "the checkpoint of step %d, written by %d nodes, was not on the slow store yet, and the parts of %s are on "
            "no fast tier of this job's nodes; %s", step, nodes, _nodes(missing), older,
        )  # fmt: skip


def _nodes(numbers: Sequence[int]) -> str:
    return f"node{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _time(path: str) -> float:
    with suppress(OSError):
        return os.stat(path).st_mtime
    return 0.0


def open_found(world: AnyWorld, found: Found, slow: str, fast: str | None) -> Opened:
    """Read what a checkpoint says of itself. Collective; raises on all ranks: CorruptedError, ChecksumError,
    MissingError, ReadError on the rank that read it, PeerError on the others."""
    manifest: Manifest | None = None
    mine: dict[int, tuple[str, Part]] = {}
    found_name = found.step, found.id, found.nodes
    with together(world, f"reading the description of {found.words}"):
        if found.fast and world.is_leader and fast is not None:
            for name in listed(fast):
                if (name.step, name.id, name.nodes, name.copy) == (*found_name, name.node in found.copies):
                    folder = os.path.join(fast, str(name))
                    mine[name.node] = folder, _part(folder, name.node)[0]
                    if name.node == 0:
                        manifest = _manifest(folder)
        elif not found.fast and world.rank == 0:
            folder = os.path.join(slow, str(Name(found.step, found.id)))
            manifest = _manifest(folder)
            for node, total in enumerate(manifest.parts):
                part, own = _part(folder, node)
                if own != total:
                    raise ChecksumError(
                        f"the description of node {node}'s file has the checksum {own}, the manifest says {total}",
                        path=folder,
                    )
                mine[node] = folder, part
    everyones = world.allgather((world.node, manifest, mine) if mine else None)
    parts: dict[int, Part] = {}
    where: list[dict[int, str]] = [{} for _ in range(world.nodes)]
    for node, said, held in (each for each in everyones if each):
        manifest = said or manifest
        for number, (folder, part) in held.items():
            parts[number] = part
            for k in range(world.nodes) if not found.fast else [node]:
                where[k][number] = folder
    with together(world, f"reading the description of {found.words}"):
        if manifest is None or (manifest.step, manifest.id) != (found.step, found.id):
            raise CorruptedError(f"the manifest of {found.words} is that of another checkpoint")
        check_parts(manifest, [parts[number] for number in sorted(parts)], found.words)
    assert manifest is not None
    return Opened(manifest, [parts[number] for number in sorted(parts)], where)


def _manifest(folder: str) -> Manifest:
    path = os.path.join(folder, MANIFEST)
    return read_manifest(read_small(path), path)


def _part(folder: str, node: int) -> tuple[Part, str]:
    """(description, its checksum)"""
    path = os.path.join(folder, part_name(node) + ".json")
    data = read_small(path)
    return read_part(data, path), f"{sum_of(data):016x}"
