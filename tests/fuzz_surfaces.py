"""Everything that takes what another user may have made, and messages for it that are damaged at random.

A surface has good messages, and `take(message)`: True if the message was taken, False if it was refused as it should
be. Anything else that it raises is a fault, and so is an assertion here that fails.

By hand, for longer and with other numbers: `python fuzz_surfaces.py [SURFACE ...] [--count N] [--seed N]`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import posixpath
import random
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import cv2
import hostile
import lmdb
import numpy as np
from checkpoints import rich_tree

import pario
from pario.checkpoint.manifest import read_manifest, read_part
from pario.checkpoint.store import sum_of
from pario.codec.packing import Packing, _sum
from pario.codec.registry import CODECS, make
from pario.decode import Image, Pickle
from pario.errors import OptionError, ParioError
from pario.files.names import part_of
from pario.files.spots import Prefixes, Spot
from pario.files.tree import Tree
from pario.plane.plane import Plane
from pario.plane.rules import JobRule, Limits, Rules
from pario.plane.words import PlaneAddress, grant_of, packed, unpacked
from pario.wire import frames
from pario.wire.frames import Link, WireError, Word
from pario.wire.server import Guest, Server

SECRET = b"s" * 32
#: What people forget to think of: in place of a number in JSON, and in the place of bytes.
LIES = [
    *(None, -1, 0, 1, 1 << 61, 1 << 200, 1.5, True, "x", "|O", "", [], {}, [[]], [1, 2], {"list": 1}, {"array": 0}),
    *("fields:[]", 'fields:[["a","|O"]]', {"dict": [[[], 1]]}, {"bytes": "*"}, {"float": "x"}, {"complex": ["1"]}),
]
_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, (1 << 63) - 1, 1 << 63)


class Surface(NamedTuple):
    """damage(rng) : a message; None: one of the good ones with damaged bytes"""

    good: list[bytes]
    take: Callable[[bytes], bool]
    damage: Callable[[random.Random], bytes] | None = None


# -- damage ------------------------------------------------------------------------------------------------------------


def spoil(node: Any, rng: random.Random) -> None:
    """Replace one value somewhere below."""
    parent: Any = None
    key: Any = None
    while isinstance(node, dict | list) and node and (parent is None or rng.random() < 0.85):
        parent, key = node, rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        node = node[key]
    parent[key] = copy.deepcopy(rng.choice([*LIES, node + 1 if isinstance(node, int) else node]))


def damaged(good: list[bytes], rng: random.Random) -> bytes:
    """A good message, or the halves of two, with a few changes: bits, bytes, numbers, pieces that come twice or not at
    all."""
    out = bytearray(rng.choice(good))
    if rng.random() < 0.1:
        other = rng.choice(good)
        out = out[: rng.randint(0, len(out))] + other[rng.randint(0, len(other)) :]
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at, way = rng.randint(0, max(0, len(out) - 1)), rng.randrange(7)
        size = min(rng.choice((1, 1, 2, 4, 8, 32)), len(out) - at)
        if way == 0 and out:
            out[at] ^= 1 << rng.randrange(8)
        elif way == 1 and out:
            out[at] = rng.randrange(256)
        elif way == 2:
            number, width = rng.choice(_NUMBERS), rng.choice((1, 2, 4, 8))
            out[at : at + width] = (number & ((1 << 8 * width) - 1)).to_bytes(width, rng.choice(("little", "big")))
        elif way == 3:
            del out[at : at + size]
        elif way == 4:
            out[at:at] = out[at : at + size] * rng.choice((1, 2, 30))
        elif way == 5:
            out[at:at] = rng.randbytes(size)
        elif rng.random() < 0.2:
            del out[at:]
    return bytes(out)


# -- the wire ----------------------------------------------------------------------------------------------------------


def wire_frames() -> Surface:
    """Frames of one that knows the secret, changed on their way: none but his come out, in their order."""
    here, there = socket.socketpair()
    sent = [(Word.WORDS, b'{"at":1}'), (7, b""), (7, b"x" * 300)]
    one = Link(here, 1 << 12)
    one.use(SECRET, b"agreed", mine=frames.CLIENT)
    for each in sent:
        one.put(*each)
    stream = one._waiting

    def take(message: bytes) -> bool:
        link = Link(there, 1 << 12)
        link.use(SECRET, b"agreed", mine=frames.SERVER)
        come = []
        try:
            if message:
                here.send(message)
            link.receive()
            while (frame := link.next()) is not None:
                come.append(frame)
        except WireError:
            return False
        finally:
            with contextlib.suppress(BlockingIOError):
                there.recv(1 << 20, socket.MSG_DONTWAIT)
            assert come == sent[: len(come)]
        return True

    return Surface([stream], take)


def _come(sock: socket.socket) -> Any:
    """A socket that listens, to which one has come."""
    return SimpleNamespace(accept=lambda: (sock, ("a test", 0)))


class _Door(Server[Guest]):
    guest = Guest

    def secret_of(self, user: str) -> bytes | None:
        return SECRET if user == "me" else None

    def took(self, link: Guest, kind: int, body: bytes) -> bool:
        raise AssertionError("nobody says anything")


def greetings() -> Surface:
    """Nobody gets in but by what the secret says of these very bytes."""
    door = _Door("a door", most_links=4, most_bytes=100, name=b"door")
    door.say = lambda *_: None
    theirs, number = b"n" * frames.NUMBER_BYTES, b"c" * frames.NUMBER_BYTES
    agreed = frames.agreed_on(b"\2me", b"door", theirs, number)
    right = frames.GREETING + number + b"\2me" + frames.proof(SECRET, frames.CLIENT, agreed)

    def take(message: bytes) -> bool:
        here, there = socket.socketpair()
        with here:
            door._accept(_come(there), 0)
            (link,) = door.links
            link.number = theirs
            if message:
                here.send(message)
            door.hear(0.0)
            let_in = link.proven
            door.drop(link)
        assert let_in == message.startswith(right), "let in without a proof, or kept out with one"
        return let_in

    return Surface([right], take)


# -- the control plane -------------------------------------------------------------------------------------------------

_RULES = Rules(
    (100e6, 1000.0),
    jobs=(JobRule("a*", guarantee=(30e6, 0.0)), JobRule("b", most=(10e6, None))),
    limits=Limits(connections=40, connections_per_user=20, jobs_per_user=8),
    secrets={"me": SECRET},
)


def control_messages() -> Surface:
    """Of clients that have proven who they are, in the order in which they come: whatever they say, a plane goes on,
    and what it grants are rates, of which no job has more than the store."""
    now = [0.0]
    plane = Plane(PlaneAddress("127.0.0.1", 0), _RULES, clock=lambda: now[0])
    plane.say = lambda *_: None  # type: ignore[method-assign]
    opened: list[socket.socket] = []
    links: list[Any] = []
    rng = random.Random(1)
    #: to be said by one who is new, and by a process
    words: list[list[dict[str, Any]]] = [
        [
            *({"do": "join", "member": f"{k:032x}", "job": job, "name": job, "node": "n", "holds": holds}
              for k, (job, holds) in enumerate([("a", None), ("b", [1e6, None]), ("c", [1e18, 5]), ("a", None)])),
            {"do": "status"},
        ],
        [
            *({"at": at, "used": [int(at * 1e6), 5 * at], "demand": demand}
              for at, demand in [(0.0, [None, None]), (1.0, [5e6, None]), (2.5, [0, 1e18]), (9.0, [1e7, 3])]),
            {"bye": 1},
        ],
    ]  # fmt: skip

    def damage(rng: random.Random) -> bytes:
        kind = rng.choice((0, 1, 1))
        said = json.loads(json.dumps(rng.choice(words[kind])))
        for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
            spoil(said, rng)
        message = packed(said)
        return bytes([kind]) + (damaged([message], rng) if rng.random() < 0.2 else message)

    def come() -> None:
        here, there = socket.socketpair()
        plane._accept(_come(there), 0)
        link = next(reversed(plane.links))
        link.use(*frames.UNPROVEN, mine=frames.SERVER)
        link.user, link.proven = rng.choice(("me", "root", "you")), True
        plane._strangers.pop(link)
        plane.welcome(link)
        opened.append(here)
        links.append(link)
        if rng.randrange(3):  # some have joined already
            first = json.loads(json.dumps(words[0][rng.randrange(4)]))
            try:
                plane.took(link, Word.WORDS, packed({**first, "member": f"{rng.randrange(24):032x}"}))
            except WireError as error:
                plane.refuse(link, str(error))

    def take(message: bytes) -> bool:
        now[0] += 0.02
        for k in [k for k, link in enumerate(links) if link.over]:
            opened[k].close()
        alive = [(sock, link) for sock, link in zip(opened, links, strict=True) if not link.over]
        opened[:], links[:] = [sock for sock, _ in alive], [link for _, link in alive]
        while len(links) < 12:
            come()
        states = [[each for each in links if not each.member and not each.asks],
                  [each for each in links if each.member]]  # fmt: skip
        link = rng.choice(states[message[0]] or [each for each in links if not each.over])
        try:
            plane.took(link, Word.WORDS, message[1:])
        except WireError as error:
            plane.refuse(link, str(error))
            return False
        finally:
            if rng.random() < 0.2:
                plane.cycle()
                lay = plane.book.layout() if plane.book.jobs else None
                if lay is not None:
                    assert (lay.rates > 0).all()
                    assert (lay.rates <= np.array(_RULES.capacity) * (1 + 1e-9)).all()
                json.dumps(plane.state(), allow_nan=False)
            for sock in opened:
                with contextlib.suppress(OSError):
                    sock.recv(1 << 20, socket.MSG_DONTWAIT)
        return True

    return Surface([], take, damage)


def what_a_plane_says() -> Surface:
    """To a job, which trusts it no further than it must."""
    said = {"grant": [1e6, None], "safe": [1e5, 10.0], "lease": 5.0, "every": 0.25}

    def damage(rng: random.Random) -> bytes:
        words = json.loads(json.dumps(said))
        spoil(words, rng)
        message = packed(words)
        return damaged([message], rng) if rng.random() < 0.3 else message

    def take(message: bytes) -> bool:
        taken = False
        with contextlib.suppress(WireError):
            grant = grant_of(unpacked(message))
            assert all(each is None or each > 0 for each in (*grant.rates, *grant.safe))
            assert 0 < grant.every_s <= grant.lease_s
            taken = True
        return taken

    return Surface([], take, damage)


# -- checkpoints and packed databases ----------------------------------------------------------------------------------


def manifests() -> Surface:
    """Descriptions of checkpoints whose own checksums fit."""
    with tempfile.TemporaryDirectory() as folder, pario.Checkpointer("self", slow=folder) as ckpt:
        ckpt.save(1, rich_tree()).wait()
        (made,) = Path(folder).glob("step-*")
        files = [(made / name).read_bytes() for name in ("manifest.json", "node-00000.json")]
    bodies = [json.loads(file)["body"] for file in files]
    bodies[1] = {**bodies[1], "pieces": bodies[1]["pieces"][:4]}  # shorter: more of the damage hits what is said

    def damage(rng: random.Random) -> bytes:
        if rng.random() < 0.2:
            return damaged(files, rng)
        body = json.loads(json.dumps(rng.choice(bodies)))
        for _ in range(rng.choice((1, 1, 2, 3))):
            spoil(body, rng)
        text = json.dumps(body).encode()
        rest = b' "body": ' + (damaged([text], rng) if rng.random() < 0.3 else text) + b"}\n"
        return b'{"xxh3": "%016x",\n' % sum_of(rest) + rest

    def take(message: bytes) -> bool:
        taken = False
        for read in (read_manifest, read_part):
            with contextlib.suppress(pario.CorruptedError):
                read(message, "file")
                taken = True
        return taken

    return Surface(files, take, damage)


def packed_entries() -> Surface:
    """The reserved entry of a packed database, its checksum put right, and packed values of each codec."""
    entry = hostile.entry_of()
    codecs = [make(each) for each in CODECS]
    packings = [Packing([codec]) for codec in codecs]
    value = b"abcdabcdabcd" * 3
    values = [hostile.packed(len(value), codec.encode(value), value) for codec in codecs]

    def damage(rng: random.Random) -> bytes:
        k = rng.randrange(2 * len(codecs))
        if k < len(codecs):
            return bytes([k]) + damaged([values[k]], rng)
        out = bytearray(damaged([entry], rng))
        if rng.random() < 0.8 and len(out) > 8:
            out[:8] = entry[:8]
            out[-8:] = _sum(bytes(out[:-8])).to_bytes(8, "little")
        return b"\xff" + bytes(out)

    def take(message: bytes) -> bool:
        try:
            if message[0] == 0xFF:
                made = Packing.from_entry(message[1:])
                assert made.sizes is None or len(made.sizes) < 1 << 20
            else:
                packings[message[0]].unpack_one(message[1:])
        except (ParioError, ValueError):
            return False
        return True

    return Surface([entry, *values], take, damage)


# -- views -------------------------------------------------------------------------------------------------------------

_KEYS = [b"a/b/c", b"a/b/d", b"a/x", b"..", b"../up", b"a/../b", b"/", b"//", b"\0", b"n%2F", b"%", b"\xff/\xfe"]
_KEYS += [b"z" * 300]
_PARTS = [
    *(b"..", b".", b"", b"a", b"b", b"c", b"d", b"x", b"%", b"%2F", b"%2E%2E", b"%00", b"a%", b"%db"),
    *(b"%~" + b"0" * 32, b"z" * 255, b"z" * 256, b"\0", b"\xff", b"\xed\xa0\x80", b"view", b"etc", b"\n", b"%4"),
]


def paths() -> Surface:
    """Paths into a view and out of it, and names below it: only what lies there is found."""
    folder = tempfile.TemporaryDirectory()
    with lmdb.open(folder.name + "/set", map_size=1 << 20, sync=False) as env, env.begin(write=True) as txn:
        for key in _KEYS:
            txn.put(key, b"value")
    tree = Tree({"": folder.name + "/set"})
    folders = {"", "a", "a/b"}
    prefixes = Prefixes(["/view", "/deep/er/view"], lambda spot: spot.path in folders)

    def damage(rng: random.Random) -> bytes:
        path = b"/".join(rng.choice(_PARTS) for _ in range(rng.randint(1, 8)))
        head = rng.choice((b"/view", b"/view/", b"/deep/er/view/", b"/deep/er/../er/view/", b"/", b"", b"/view/a/b/"))
        return head + (damaged([path or b"."], rng) if rng.random() < 0.3 else path)

    def take(message: bytes) -> bool:
        found = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):
            found += [prefixes.absolute(message)] if message.startswith(b"/") else []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):
            found.append(prefixes.relative(Spot(0, "a/b"), message.lstrip(b"/")))
        for each in found:
            if isinstance(each, Spot):
                assert not {"", ".", ".."} & set(each.path.split("/")) or not each.path
        text = message.lstrip(b"/").decode("utf-8", "surrogateescape")
        part_of(posixpath.basename(text))
        try:
            node = tree.find(text)
        except (FileNotFoundError, NotADirectoryError, OptionError):
            return any(found)
        if node.kind == "file":
            assert tree.key(node) in _KEYS
            assert tree.read(node) == b"value"
        assert folder.name  # as long as its files are read
        return True

    return Surface([], take, damage)


# -- values ------------------------------------------------------------------------------------------------------------


def of_decoder(make_decoder: Callable[[], Any], good: list[bytes]) -> Surface:
    """A value becomes a row or a failure, and its neighbours stay as they are."""

    def take(message: bytes) -> bool:
        return not hostile.outcome(make_decoder(), good[0], message)[0].startswith("refused")

    return Surface(good, take)


def pictures() -> list[bytes]:
    image = np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8)
    kinds = {".png": (), ".jpg": (), ".webp": (cv2.IMWRITE_WEBP_QUALITY, 101), ".bmp": (), ".tiff": (), ".ppm": ()}
    found = [cv2.imencode(kind, image, list(options))[1].tobytes() for kind, options in kinds.items()]
    return [*found, cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_PROGRESSIVE, 1])[1].tobytes(), hostile.gif(4, 4)]


FIRED: list[int] = []


def fired(*_: Any) -> None:
    """No pickle may call this."""
    FIRED.append(1)


class _Fires:
    def __reduce__(self) -> Any:
        return fired, (1,)


def pickles() -> Surface:
    array = np.arange(6, dtype="f4").reshape(2, 3)
    values = [{"a": array}, {"a": [1, 2.5, None]}, {"a": {"b": (b"x", "y")}}, {"a": np.float64(2)}, {"a": _Fires()}]
    good = [hostile.dumped({"a": 1}), *(hostile.dumped(each, k) for each in values for k in (0, 2, 4))]
    decoder = of_decoder(lambda: Pickle(["a"], allow=[]), good)

    def take(message: bytes) -> bool:
        taken = decoder.take(message)
        assert not FIRED, "a pickle has called a function"
        return taken

    return Surface(good, take)


def _group(name: str) -> Callable[[], Surface]:
    def made() -> Surface:
        make_decoder, good, _ = next(iter(hostile.HOSTILE[name].values()))
        return of_decoder(make_decoder, [good])

    return made


SURFACES: dict[str, Callable[[], Surface]] = {
    "frames": wire_frames,
    "greetings": greetings,
    "control": control_messages,
    "what a plane says": what_a_plane_says,
    "manifests": manifests,
    "packed entries": packed_entries,
    "paths": paths,
    "images": lambda: of_decoder(lambda: Image(8), pictures()),
    "pickles": pickles,
    **{name: _group(name) for name in ("datum", "npy", "npz", "json", "msgpack", "zstd", "gzip")},
}


def fuzz(name: str, count: int, seed: int) -> int:
    """So many messages to a surface; how many it took. Raises what is a fault, with the message."""
    surface, taken = SURFACES[name](), 0
    rng = random.Random(f"{name} {seed}")
    for k in range(count):
        message = damaged(surface.good, rng) if surface.damage is None else surface.damage(rng)
        try:
            taken += surface.take(message)
        except BaseException as error:
            error.add_note(f"{name}, seed {seed}, message {k}: {message!r}") if hasattr(error, "add_note") else None
            raise
    return taken


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("surfaces", nargs="*", choices=[[], *SURFACES])
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    for name in given.surfaces or SURFACES:
        begin = time.monotonic()
        taken = fuzz(name, given.count, given.seed)
        print(f"{name}: seed {given.seed}, {given.count:,} messages, {taken:,} taken, {time.monotonic() - begin:.1f} s")


if __name__ == "__main__":
    main()
