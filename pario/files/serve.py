"""The supervisor's loop: receives calls and answers each of them, whatever happens."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable
from typing import NamedTuple

from pario.files.beyond import beyond
from pario.files.calls import ON_DESCRIPTORS, ON_PATHS, TWO_PATHS, Handler, signed
from pario.files.notify import Gone
from pario.files.numbers import CALLS, NUMBERS, machine
from pario.files.spots import Escaped, Spot
from pario.files.view import AT_FDCWD, Call, View
from pario.files.writing import ends, renames, writes

__all__ = ["serve"]

_ARGUMENTS = 6


class _Way(NamedTuple):
    """How to answer a call with one path.

    folder_at, path_at : positions in the call of the folder's descriptor (0: there is none) and of the path
    """

    folder_at: int
    path_at: int
    answer: Handler
    name: str


def _ways() -> dict[int, _Way]:
    found = {}
    for name, answer in ON_PATHS.items():
        if name in NUMBERS:
            ((folder, path),) = CALLS[name].paths
            found[NUMBERS[name]] = _Way(folder + _ARGUMENTS if folder >= 0 else 0, path + _ARGUMENTS, answer, name)
    return found


def serve(view: View) -> None:
    """Until no program is left that has the filter."""
    ways = _ways()
    others: dict[int, Callable[[View, Call], None]] = {
        NUMBERS[name]: answer for name, answer in ON_DESCRIPTORS.items() if name in NUMBERS
    }
    others |= {NUMBERS[name]: _two_paths(name) for name in TWO_PATHS if name in NUMBERS}
    numbers, outputs = machine(), view.outputs
    if numbers is not None and outputs is not None:
        others[numbers.exit_group] = lambda view, call: ends(view, outputs, call)
    listener, heads = view.listener, view.heads
    receive, go_on, path_of = listener.receive, listener.go_on, view.memory.path
    while True:
        call = receive()
        if call is None:
            if _over(listener.fd):
                return
            continue
        way = ways.get(call[3])
        if way is None:
            other = others.get(call[3])
            if other is None:
                go_on(call[0])
            else:
                _answer(view, call, other)
            continue
        path = path_of(call[1], call[way.path_at])
        if path is None or (
            path[:1] == b"/" and not path.startswith(heads) and b"/." not in path and b"//" not in path
        ):
            go_on(call[0])
        else:
            _answer(view, call, _one_path, way, path)


def _over(fd: int) -> bool:
    """True if all programs have ended."""
    poll = select.poll()
    poll.register(fd, 0)
    return bool(poll.poll(0))


def _answer(view: View, call: Call, answer: Callable[..., None], *arguments: object) -> None:
    """Answer in any case: a call that gets no answer hangs its program."""
    try:
        answer(view, call, *arguments)
    except Gone:
        pass
    except FileNotFoundError as e:
        view.listener.refuse(call[0], e.errno or errno.ENOENT)
    except NotADirectoryError as e:
        view.listener.refuse(call[0], e.errno or errno.ENOTDIR)
    except OSError as e:
        view.listener.refuse(call[0], e.errno or errno.EIO)
    except MemoryError:
        view.listener.refuse(call[0], errno.ENOMEM)
    except Exception as e:
        view.listener.refuse(call[0], errno.EIO)
        view.report(e)


def _one_path(view: View, call: Call, way: _Way, path: bytes) -> None:
    folder = signed(call[way.folder_at]) if way.folder_at else AT_FDCWD
    spot = view.spot(call[1], folder, path)
    if spot is None:
        view.listener.go_on(call[0])
    elif isinstance(spot, Escaped):
        beyond(view, call, spot.path)
    elif view.outputs is not None and spot.root == view.outputs.root:
        writes(view, view.outputs, call, way.name, spot.path)
    else:
        way.answer(view, call, spot)


def _two_paths(name: str) -> Callable[[View, Call], None]:
    """rename and link: never across a view's border, and never inside."""
    positions = CALLS[name].paths

    def answer(view: View, call: Call) -> None:
        paths: list[bytes] = []
        spots: list[Spot | Escaped | None] = []
        for folder, at in positions:
            path = view.memory.path(call[1], call[at + _ARGUMENTS])
            if path is None:
                view.listener.go_on(call[0])  # which finds the same
                return
            where = signed(call[folder + _ARGUMENTS]) if folder >= 0 else AT_FDCWD
            spot = view.spot(call[1], where, path)
            spots.append(spot)
            paths.append(spot.path if isinstance(spot, Escaped) else _whole(view, call[1], where, path))
        inside = [spot for spot in spots if isinstance(spot, Spot)]
        outputs = view.outputs
        if not any(spots):
            view.listener.go_on(call[0])
        elif outputs is not None and [spot.root for spot in inside] == 2 * [outputs.root]:
            renames(view, outputs, call, name, inside[0].path, inside[1].path)
        elif inside:
            if outputs is None or inside[0].root != outputs.root:
                view.find(inside[0])
            number = errno.EROFS if len(inside) == len(spots) else errno.EXDEV
            raise OSError(number, os.strerror(number))
        else:
            beyond(view, call, *paths)

    return answer


def _whole(view: View, thread: int, folder: int, path: bytes) -> bytes:
    return path if path[:1] == b"/" else (view.link(thread, folder) or b"") + b"/" + path
