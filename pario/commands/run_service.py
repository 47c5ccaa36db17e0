"""The service that `pario run` starts for its node when PARIO_TIERS is set and PARIO_SERVICE is not.

All scripts of this user that run on the node with the same tiers, ranks of one job or not, read out of its memory
(pario/lmdb/served.py).

    script --> locks the folder's lock file, shared, as long as it runs
    first of them --> starts the service, a process that holds another lock of that file while it lives
    service --> waits until no script holds the first lock, removes the folder, ends

The system releases locks when a process ends, however that happens: a script that was killed does not keep the service,
and a service that was killed is started again by the next script.

The process is forked before the script begins, when there are no threads of pario's and no MPI yet: an interpreter that
starts anew would import Numba a second time, and the first lmdb.open would wait for that. It is nobody's child:
programs that wait for any of their own children do not meet it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial

from pario import __version__, machine
from pario.errors import ParioError
from pario.kernels.private import PrivateDirectory
from pario.machine import allow_many_files, closing_fd, silence
from pario.options import Tier

_log = logging.getLogger("pario")


def script_tiers() -> Sequence[Tier]:
    """The tiers of which a script is to have a service of its own; () if it needs none. Raises OptionError."""
    if not os.environ.get("PARIO_TIERS") or "PARIO_SERVICE" in os.environ:
        return ()
    from pario.dataset.tiers import wanted_tiers
    from pario.options import Options

    return wanted_tiers(Options()) or ()


def join_service() -> None:
    """`use_own_service`, if the script is to have one. Raises OptionError."""
    tiers = script_tiers()
    if tiers:
        use_own_service(tiers)


def use_own_service(tiers: Sequence[Tier]) -> None:
    """Let this process and those that it starts use a service of this node for scripts with these tiers, and start it
    if there is none. It ends with this process, or with the last of all that use it. Without one, a warning says why.
    """
    from pario.tiers.asking import LOCK, STARTS
    from pario.tiers.disk_files import lock_use, root_of, used_lock

    try:
        folder = _folder(tiers)
        directory = PrivateDirectory(root_of(folder))
        mine = used_lock(directory, LOCK)
        os.register_at_fork(after_in_child=partial(_forget, mine, os.fstat(mine)))
        with closing_fd(directory.open_file(LOCK)) as start:
            if lock_use(start, alone=True, byte=STARTS):
                _start(folder, start)
    except (OSError, ParioError) as e:
        _log.warning("the script has no service of its node: %s", e)
        return
    os.environ["PARIO_SERVICE"] = folder


def _folder(tiers: Sequence[Tier]) -> str:
    """The same for all scripts that can share a service. Raises OSError, OptionError."""
    from pario.tiers.asking import here

    temporary = tempfile.gettempdir()
    if machine.file_system(temporary).shared:  # the folder of a service is on a disk of the node
        temporary = "/tmp"
    # A process of another container may not be able to map what the service holds.
    words: list[object] = [__version__, machine.boot(), os.stat("/proc/self/ns/pid").st_ino]
    for tier in tiers:
        where = tier.where if tier.where == "memory" else os.path.abspath(here(tier.where))
        words += [where, tier.quota_bytes, tier.force]
    name = hashlib.sha256(repr(words).encode()).hexdigest()[:16]
    return _own(os.path.join(temporary, f"pario-run-{os.geteuid()}-{name}"))


def _own(path: str) -> str:
    """The folder; where another user has taken its name, which can be foretold, one with more of a name. Raises
    OSError."""
    with suppress(FileNotFoundError):
        if os.lstat(path).st_uid != os.geteuid():
            above, begin = os.path.split(f"{path}-")
            there = [each for each in os.scandir(above) if each.name.startswith(begin)]
            mine = [each.path for each in there if each.stat(follow_symlinks=False).st_uid == os.geteuid()]
            return min(mine) if mine else tempfile.mkdtemp(prefix=begin, dir=above)
    return path


def _start(folder: str, lock: int) -> None:
    """Start the process, which inherits the lock. Raises OSError."""
    from pario.dataset import host  # noqa: F401  before the fork: no other process imports it

    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    status = 1
    try:
        if os.fork():
            os._exit(0)
        status = _work(folder, lock)
    finally:  # whatever happens, this process is not the script
        os._exit(status)


def _forget(lock: int, status: os.stat_result) -> None:
    """In a forked process, which is not to keep the service: it may outlive the script."""
    with suppress(OSError):  # the script may have closed it
        if os.path.samestat(os.fstat(lock), status):
            os.close(lock)


def _work(folder: str, lock: int) -> int:
    """The service, in its process. Returns its exit status.

    lock : descriptor of its lock file, with the lock that says that it starts or lives
    """
    from pario.comm.solo import Solo
    from pario.dataset.host import Host
    from pario.kernels.jit import warm_up
    from pario.options import Options
    from pario.tiers.disk_files import lock_use

    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(0))
    # The launcher's connections among them: for it, this process is none.
    os.closerange(3, lock)
    os.closerange(lock + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    silence(0, 1)
    allow_many_files()
    try:
        host = Host(folder, Options(), Solo())
    except (ParioError, OSError) as e:
        os.write(2, f"error: the service of the node does not start: {e}\n".encode())
        return 1
    with closing(host):
        # The script that has started it may end first, and a reader of its output waits for the end of that.
        silence(2)
        warm_up()  # while the script still imports what it needs
        lock_use(lock, alone=True, wait=True)
        host.retire()
        _remove(folder, lock)
    return 0


def _remove(folder: str, lock: int) -> None:
    """Remove the folder. Anyone who waits for the lock meanwhile finds that the file has gone, and makes a new one."""
    from pario.tiers.asking import LOCK
    from pario.tiers.disk_files import root_of

    root = root_of(folder)
    with suppress(OSError):  # somebody has tidied up
        if os.path.samestat(os.fstat(lock), os.stat(os.path.join(root, LOCK), follow_symlinks=False)):
            PrivateDirectory(root).remove(LOCK)
            os.rmdir(root)
            os.rmdir(folder)
