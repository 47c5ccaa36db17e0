"""Control groups with a memory limit, of version 1 and of version 2, as root."""

from __future__ import annotations

import itertools
import os
import time
from contextlib import suppress
from pathlib import Path

_numbers = itertools.count()


class MemoryGroup:
    """prefix : what starts a command in the group. Raises OSError."""

    def __init__(self, nbytes: int) -> None:
        name = f"pario-test-{os.getpid()}-{next(_numbers)}"
        self.limit = nbytes
        error: OSError | None = None
        for top, file in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
            self.folder = Path(top) / name
            try:
                self.folder.mkdir()
                (self.folder / file).write_text(str(nbytes))
            except OSError as e:
                error = e
                self.remove()
                continue
            self.prefix = ("sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh")
            return
        assert error is not None
        raise error

    def taken(self) -> tuple[int, int]:
        """Bytes that the kernel cannot take back: (of processes, shared by them)."""
        stat = self._stat()
        return stat.get("rss", stat.get("anon", 0)), stat["shmem"]

    def free(self) -> int:
        """Bytes that programs in it can still allocate."""
        stat = self._stat()
        used = [int((self.folder / name).read_text()) for name in _USED if (self.folder / name).exists()]
        return self.limit - used[0] + stat["active_file"] + stat["inactive_file"]

    def kills(self) -> int:
        """Processes that the kernel has killed there."""
        for name in ("memory.events", "memory.oom_control"):
            with suppress(OSError):
                return int(_words((self.folder / name).read_text())["oom_kill"])
        raise AssertionError("the kernel does not tell")

    def _stat(self) -> dict[str, int]:
        return {name: int(number) for name, number in _words((self.folder / "memory.stat").read_text()).items()}

    def remove(self) -> None:
        end = time.monotonic() + 5
        while self.folder.exists() and time.monotonic() < end:
            with suppress(OSError):
                self.folder.rmdir()
            time.sleep(0.05)


_USED = ("memory.usage_in_bytes", "memory.current")


def _words(text: str) -> dict[str, str]:
    return dict(line.split()[:2] for line in text.splitlines())
