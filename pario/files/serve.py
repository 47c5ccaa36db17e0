"""The supervisor's loop: receives calls and answers each of them, whatever happens.

The kernel hands a call over when somebody receives it. Until then a signal ends the call with EINTR, which `open` never
does on a disk. So more threads receive calls as long as some have to wait (crew.py). One at a time answers, except that
records are read side by side.
"""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable
from typing import NamedTuple

from pario.errors import ParioError
from pario.files import calls
from pario.files.beyond import OPENS, beyond, ends, renames, writes, writing
from pario.files.crew import Duty
from pario.files.database import errno_of
from pario.files.notify import Gone, Receiver, failed
from pario.files.numbers import CALLS, NUMBERS, machine
from pario.files.rights import lent
from pario.files.spots import Escaped, Spot, has_dots
from pario.files.view import AT_FDCWD, Call, View

_ARGUMENTS, _NOFOLLOW = 6, 0x100
_NEW_ONLY = os.O_CREAT | os.O_EXCL
#: where names of descriptors are
_PROCESSES = (b"/proc/", b"/dev/fd/", b"/dev/std")


class _Way(NamedTuple):
    """How to answer a call with one path.

    folder_at, path_at : positions in the call of the folder's descriptor (0: there is none) and of the path
    if_none : what a path that is not given means: b"" the descriptor itself; None: an error, the kernel's business
    changes : changes what it finds
    """

    folder_at: int
    path_at: int
    answer: calls.Handler
    name: str
    if_none: bytes | None
    changes: bool


def _ways() -> dict[int, _Way]:
    found = {}
    for name, answer in calls.ON_PATHS.items():
        if name in NUMBERS:
            ((folder, path),) = CALLS[name].paths
            folder_at = folder + _ARGUMENTS if folder >= 0 else 0
            if_none = b"" if name in calls.CHANGES and folder >= 0 else None
            found[NUMBERS[name]] = _Way(folder_at, path + _ARGUMENTS, answer, name, if_none, name in calls.CHANGES)
    return found


def serve(view: View) -> None:
    """Until no program is left that has the filter. Raises what a thread raises: then calls have no answer any more."""
    view.crew.work(lambda duty: _serve(view, duty))


def _serve(view: View, duty: Duty) -> None:
    ways = _ways()
    others: dict[int, Callable[[View, Call], None]] = {
        NUMBERS[name]: answer for name, answer in calls.ON_DESCRIPTORS.items() if name in NUMBERS
    }
    others |= {NUMBERS[name]: _two_paths(name) for name in calls.TWO_PATHS if name in NUMBERS}
    if (outputs := view.outputs) is not None:
        others[machine().exit_group] = lambda view, call: ends(view, outputs, call)
    listener, heads = view.listener, view.heads
    receiver = Receiver(listener.fd)
    receive, go_on, path_of = receiver.receive, listener.go_on, view.memory.path
    begin, end = duty.begin, duty.end
    while True:
        call = receive()
        if call is None:
            if _over(listener.fd):
                return
            continue
        begin(receiver.others_wait)
        try:
            way = ways.get(call[3])
            if way is None:
                other = others.get(call[3])
                if other is None:
                    go_on(call[0])
                else:
                    _answer(view, call, other)
                continue
            address = call[way.path_at]
            path = path_of(call[1], address) if address else way.if_none
            if path is None or (
                path[:1] == b"/"
                and not way.changes
                and not path.startswith(heads)
                and not path.startswith(_PROCESSES)
                and not has_dots(path)
            ):
                go_on(call[0])
            else:
                _answer(view, call, _one_path, way, path)
        finally:
            end()


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
    except Exception as e:
        number = errno_of(e)
        view.listener.refuse(call[0], number)
        if not isinstance(e, OSError) or isinstance(e, ParioError) or number == errno.ENOMEM:
            view.report(e, number)


def _one_path(view: View, call: Call, way: _Way, path: bytes) -> None:
    if not path and way.folder_at and way.changes:
        calls.change_opened(view, call)
        return
    if way.name in ("readlink", "readlinkat"):
        text = view.link_text(call[1], path)
        if text is not None and _may_read(view, call, path):
            calls.say_link(view, call, way.name, text)
            return
    folder = calls.signed(call[way.folder_at]) if way.folder_at else AT_FDCWD
    spot = view.spot(call[1], folder, path)
    if not isinstance(spot, Spot) and _changes(way, call):
        whole = spot.path if spot else _whole(view, call[1], folder, path)
        if (way.changes or os.path.normpath(whole).startswith(_PROCESSES)) and view.leads_to_record(call[1], whole):
            raise failed(errno.EROFS)
    if spot is None:
        view.listener.go_on(call[0])
    elif isinstance(spot, Escaped):
        beyond(view, call, spot.named, spot.path)
    elif view.outputs is not None and spot.root == view.outputs.root:
        with writing(view, view.outputs, call):
            writes(view, view.outputs, call, way.name, spot.path)
    elif way.name == "openat2":
        way.answer(view, call, spot)
    else:
        way.answer(view, call, view.followed(spot, _follows(way, call)))


def _may_read(view: View, call: Call, path: bytes) -> bool:
    """Where descriptors lead: everybody his own, others' only those who could read it without a view."""
    if path.startswith((b"/proc/self/", b"/proc/thread-self/", b"/dev/fd/")):
        return True
    with lent(view, call) as may:
        return may


def _follows(way: _Way, call: Call) -> bool:
    """Whether the call follows a symbolic link at the end of its path."""
    at = calls.FOLLOW.get(way.name, -1)
    flags = call[_ARGUMENTS + at] if at is not None and at >= 0 else 0
    if way.name in OPENS:
        return not flags & os.O_NOFOLLOW and flags & _NEW_ONLY != _NEW_ONLY
    return at != -1 and not flags & _NOFOLLOW


def _changes(way: _Way, call: Call) -> bool:
    """Whether the call may change what the path leads to. A write to a record fails, and still leaves its time."""
    if way.changes:
        at = calls.CHANGES[way.name]
        return at is None or not call[_ARGUMENTS + at] & _NOFOLLOW
    at, _ = OPENS.get(way.name, (None, 0))
    return at is not None and bool(call[_ARGUMENTS + at] & (os.O_WRONLY | os.O_RDWR))


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
            where = calls.signed(call[folder + _ARGUMENTS]) if folder >= 0 else AT_FDCWD
            spot = view.spot(call[1], where, path)
            spots.append(spot)
            paths.append(spot.path if isinstance(spot, Escaped) else _whole(view, call[1], where, path))
        inside = [spot for spot in spots if isinstance(spot, Spot)]
        outputs = view.outputs
        if not any(spots):
            view.listener.go_on(call[0])
        elif outputs is not None and [spot.root for spot in inside] == 2 * [outputs.root]:
            with writing(view, outputs, call):
                renames(view, outputs, call, name, inside[0].path, inside[1].path)
        elif inside:
            if isinstance(spots[0], Spot) and (outputs is None or spots[0].root != outputs.root):
                view.find(view.followed(spots[0], last=False))
            number = errno.EROFS if len(inside) == len(spots) else errno.EXDEV
            raise failed(number)
        else:
            beyond(view, call, all(not isinstance(spot, Escaped) or spot.named for spot in spots), *paths)

    return answer


def _whole(view: View, thread: int, folder: int, path: bytes) -> bytes:
    return path if path[:1] == b"/" else (view.link(thread, folder) or b"") + b"/" + path
