"""Starts a program under a view, and ends with it.

    front end          the command that the user started: passes signals on, returns the program's exit status
      supervisor       opens the datasets and serves until the last descendant has ended
        program        installs the filter, hands its descriptor up, and becomes COMMAND

The supervisor is the program's parent, because some systems let only ancestors read a process's memory. It ignores the
signals of a terminal, and goes on behind the back of a front end whose program has ended while others live.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import pickle
import shutil
import signal
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from pario.errors import OptionError, ParioError
from pario.files.notify import Listener, Memory, check_kernel, filter_program, install, set_subreaper
from pario.files.numbers import NUMBERS, OTHER_WAY, machine
from pario.files.outputs import Outputs
from pario.files.serve import serve
from pario.files.spots import checked_prefix, real_prefix
from pario.files.view import Limits, View, say, sweep
from pario.machine import allow_many_files, silence

if TYPE_CHECKING:
    from pario.files.tree import Tree

#: what the front end passes on to the program; the terminal sends SIGINT and SIGQUIT to both itself
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
#: what the supervisor must survive as long as it has programs to serve
_SURVIVED = {*_PASSED_ON, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGPIPE}
_NOT_FOUND, _NOT_RUN = 127, 126  # exit status, as of a shell
_ENDED = (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED)
_FRAME = struct.Struct("cq")
#: Read from the program's memory before it runs, to see that this is allowed.
_KNOWN = b"a word that this process knows"

#: a folder, and what opens the records that appear there
Root = tuple[str, Callable[[], "Tree"]]


class Plan(NamedTuple):
    """
    roots : what appears where; opened in the supervisor, before the command begins
    command : the program and its arguments
    outputs : where it may write
    """

    roots: Sequence[Root]
    command: Sequence[str]
    limits: Limits = Limits()
    outputs: Outputs | None = None


def run_under_view(plan: Plan) -> int:
    """Run a command with records as files under some folders; returns its exit status, 128 + N for signal N.

    Raises OptionError for a folder that cannot be, ParioError where the kernel cannot do it, and what opening raises.
    """
    try:
        return _run(plan)
    finally:
        if plan.outputs:
            plan.outputs.leave()


def _run(plan: Plan) -> int:
    check_kernel()
    _check_program(plan.command[0])
    outputs = [plan.outputs.folder] if plan.outputs else []
    _check_apart([*(os.path.abspath(prefix) for prefix, _ in plan.roots), *outputs])
    plan = plan._replace(roots=[(checked_prefix(prefix), opens) for prefix, opens in plan.roots])
    set_subreaper()  # if the supervisor dies, its program comes here
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SURVIVED)
    reads, writes = os.pipe()
    supervisor = os.fork()
    if not supervisor:
        os.close(reads)
        _supervise(plan, writes, before)
    os.close(writes)
    signal.pthread_sigmask(signal.SIG_SETMASK, before | set(_PASSED_ON))
    try:
        return _follow(reads, supervisor, plan.outputs)
    finally:
        os.close(reads)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _check_program(name: str) -> None:
    """Raises OptionError for a program that needs privileges of another user."""
    path = shutil.which(name)
    found = os.stat(path) if path else None
    if found is not None and (
        (found.st_mode & stat.S_ISUID and found.st_uid != os.geteuid())
        or (found.st_mode & stat.S_ISGID and found.st_gid not in (os.getegid(), *os.getgroups()))
    ):
        raise OptionError(
            f"{path} runs as another user or group (setuid), and no program under a view may gain privileges",
            hint="Run it outside, on files from `pario data unpack`, or mount the dataset: pario files mount",
        )


def _check_apart(prefixes: Sequence[str]) -> None:
    """Raises OptionError for a folder in another."""
    real = sorted((real_prefix(prefix) + "/", prefix) for prefix in prefixes)
    for (one, shown), (other, other_shown) in itertools.pairwise(real):
        if other.startswith(one):
            raise OptionError(
                f"{other_shown!r} lies in {shown!r}, and a view shows one dataset below each folder",
                hint="Name folders side by side.",
            )


# -- the front end -----------------------------------------------------------------------------------------------------


def _follow(reads: int, supervisor: int, outputs: Outputs | None) -> int:
    with open(reads, "rb", closefd=False) as pipe:
        program = 0
        while True:
            head = pipe.read(_FRAME.size)
            if len(head) < _FRAME.size:
                return _without_supervisor(supervisor, program, outputs)
            kind, number = _FRAME.unpack(head)
            if kind == b"P":
                program = number
                threading.Thread(target=_pass_on, args=(program,), daemon=True).start()
            elif kind == b"E":
                return int(number)
            else:
                os.waitpid(supervisor, 0)
                raise pickle.loads(pipe.read(number))


def _pass_on(program: int) -> NoReturn:
    while True:
        found = signal.sigwaitinfo(_PASSED_ON)
        # A terminal has sent it to the program, too.
        if found.si_code <= 0:
            try:
                os.kill(program, found.si_signo)
            except OSError:
                continue


def _without_supervisor(supervisor: int, program: int, outputs: Outputs | None) -> int:
    """The supervisor died. The program gets errors from now on, and ends by itself."""
    _, status = os.waitpid(supervisor, 0)
    if program:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(program, 0)
    sweep()
    raise ParioError(
        f"the supervisor of the view ended with status {os.waitstatus_to_exitcode(status)}: since then every call with "
        'a path failed with ENOSYS ("Function not implemented") in the programs under it',
        hint=f"Their outputs are not merged; they lie in {outputs.local}." if outputs else None,
    )


# -- the supervisor ----------------------------------------------------------------------------------------------------


def _supervise(plan: Plan, writes: int, before: set[Any]) -> NoReturn:
    code = 1
    try:
        view, program = _start(plan, before)
        os.write(writes, _FRAME.pack(b"P", program))
        threading.Thread(target=_serve, args=(view,)).start()
        _reap(program, writes, plan.outputs)
        view.skeleton.close()
        code = 0
    except BaseException as e:
        try:
            text = pickle.dumps(e)
        except Exception:
            text = pickle.dumps(ParioError(repr(e)))
        with contextlib.suppress(OSError):
            os.write(writes, _FRAME.pack(b"X", len(text)) + text)
    finally:
        os._exit(code)


def _start(plan: Plan, before: set[Any]) -> tuple[View, int]:
    """Returns the view and the process that became the program."""
    set_subreaper()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    known = ctypes.create_string_buffer(_KNOWN)
    program = os.fork()  # before anything here starts threads
    if not program:
        ours.close()
        _become(plan, theirs, before)
    theirs.close()
    try:
        readable = Memory().read(program, ctypes.addressof(known), len(_KNOWN)) == _KNOWN
    except OSError:
        readable = False
    if not readable or os.readlink("/proc/self") != str(os.getpid()):  # calls would go on as if there were no view
        ours.close()  # the process ends by that
        os.waitpid(program, 0)
        raise ParioError(
            "pario may not read the memory of programs that it starts (/proc/sys/kernel/yama/ptrace_scope, or "
            "a container's policy), or /proc shows the processes of another namespace",
            hint=OTHER_WAY,
        )
    records = [(prefix, opens()) for prefix, opens in plan.roots]
    most = allow_many_files()
    limits = plan.limits._replace(held_files=min(plan.limits.held_files, max(1, most // 2)))
    ours.send(b"go")
    message, handed, _, _ = socket.recv_fds(ours, 64, 1)
    if not handed:
        os.waitpid(program, 0)
        number = int(message or b"0")
        raise _cannot(number)
    listener = Listener(handed[0])
    os.set_inheritable(listener.fd, False)
    ours.close()
    if not listener.can_hand():
        listener.close()  # the program gets errors, and is not waited for: it may not end by itself
        os.kill(program, signal.SIGKILL)
        os.waitpid(program, 0)
        raise ParioError(
            f"this kernel ({os.uname().release}) cannot put descriptors into programs: a view needs Linux 5.9",
            hint=OTHER_WAY,
        )
    return View(records, listener, limits, plan.outputs), program


def _cannot(number: int) -> ParioError:
    if number == errno.EBUSY:
        return ParioError(
            "this process runs under a view, or another supervisor of system calls, already, and the kernel allows one",
            hint="Give all datasets to one view: pario files view train.lmdb=/train val.lmdb=/val -- COMMAND",
        )
    return ParioError(f"the kernel refuses the filter of system calls: {os.strerror(number)}")


def _serve(view: View) -> None:
    try:
        serve(view)
    except BaseException as e:
        try:
            view.report(e)
        finally:
            os._exit(1)  # closes the listener: programs get errors


def _reap(program: int, writes: int, outputs: Outputs | None) -> None:
    """Wait for the program and for orphans, which come to a subreaper, until none is left.

    The thread that serves stops threads for a moment (moving.py), and waits for those stops itself: they are seen here,
    too, but not taken away.
    """
    while True:
        try:
            seen = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            if seen is None or seen.si_code not in _ENDED:
                time.sleep(1e-3)
                continue
        except ChildProcessError:
            return
        found, status = os.waitpid(seen.si_pid, 0)
        if found == program:
            code = os.waitstatus_to_exitcode(status)
            if outputs is not None:
                code = _merge(outputs, code)
            silence(0, 1, 2)
            try:
                os.write(writes, _FRAME.pack(b"E", code if code >= 0 else 128 - code))
            except OSError:
                continue
            os.close(writes)


def _merge(outputs: Outputs, code: int) -> int:
    """Bring the outputs to their folder, say what could not be; returns the exit status, never 0 for less than all."""
    try:
        found = outputs.merge()
    except OSError as e:
        say(f"error: cannot merge the outputs: {e}. They lie in {outputs.local}\n")
        return code or 1
    lines = [f"{len(found.merged):,} files merged into {outputs.folder}"]
    lines += [f"not merged, because the name was taken: {name}" for name in found.conflicts]
    lines += [f"not merged, because the process that wrote it was killed: {name}" for name in found.broken]
    if found.kept:
        lines.append(f"what was not merged lies in {found.kept}")
    say("".join(f"pario view: {line}\n" for line in lines))
    return code or int(bool(found.conflicts or found.broken))


# -- the program -------------------------------------------------------------------------------------------------------


def _become(plan: Plan, theirs: socket.socket, before: set[Any]) -> NoReturn:
    command = plan.command
    try:
        program = filter_program([*NUMBERS.values(), *([machine().exit_group] if plan.outputs else [])])
        if theirs.recv(16) != b"go":
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
            signal.signal(number, signal.SIG_DFL)
        try:
            fd = install(program)
        except OSError as e:
            theirs.send(b"%d" % (e.errno or errno.EIO))
            os._exit(1)
        # Nothing that takes a path before the supervisor has the descriptor: nobody would answer.
        socket.send_fds(theirs, [b"fd"], [fd])
        os.close(fd)
        theirs.close()
        os.execvp(command[0], list(command))
    except FileNotFoundError:
        os.write(2, f"error: there is no program {command[0]!r}\n".encode())
        os._exit(_NOT_FOUND)
    except OSError as e:
        os.write(2, f"error: cannot run {command[0]!r}: {e.strerror}\n".encode())
        os._exit(_NOT_RUN)
    finally:
        os._exit(1)
