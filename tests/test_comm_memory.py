"""Is there memory for the ring: what the kernel's files say, and shared memory whose pages cannot be had."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pario import machine as kernel
from pario.comm import memory

GIB = 1 << 30


MOUNTS = """\
20 1 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw
21 1 0:2 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a machine with 8 GiB available, 2 more by swapping, and no limits."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("")
    (proc / "self" / "mountinfo").write_text(MOUNTS)
    (proc / "meminfo").write_text("MemTotal: 99999999 kB\nMemAvailable: 8388608 kB\nSwapFree: 2097152 kB\n")
    lines, isdir = kernel._lines, os.path.isdir
    monkeypatch.setattr(kernel, "_lines", lambda path: lines(f"{tmp_path}{path}"))
    opened = os.open
    monkeypatch.setattr(os, "open", lambda path, *more: opened(f"{tmp_path}{path}", *more))
    monkeypatch.setattr(os.path, "isdir", lambda path: isdir(f"{tmp_path}{path}"))
    return tmp_path


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def free() -> int:
    """The largest size that is not refused."""
    low, high = 0, 1 << 50
    while high - low > 1:
        middle = (low + high) // 2
        if memory.refusal(middle) is None:
            low = middle
        else:
            high = middle
    return low


def test_the_machine(machine: Path) -> None:
    assert free() == 10 * GIB
    (machine / "proc" / "meminfo").unlink()
    assert memory.refusal(1 << 60) is None  # nothing is known: nothing is refused


def test_limits_of_version_2(machine: Path) -> None:
    (machine / "proc" / "self" / "cgroup").write_text("0::/slurm/job_7\n")
    stat = "anon 5\ninactive_file 1048576\nactive_file 1048576\nshmem 7"
    group(machine / "sys/fs/cgroup" / "slurm" / "job_7", memory__max="max", memory__current=GIB, memory__stat=stat)
    assert free() == 10 * GIB
    above = machine / "sys/fs/cgroup" / "slurm"
    for name, content in (("memory.max", 3 * GIB), ("memory.current", GIB), ("memory.stat", stat)):
        (above / name).write_text(f"{content}\n")
    assert free() == 2 * GIB + (2 << 20)
    with pytest.raises(memory.ParioError, match=r"memory is too small.*: 4,294,967,296 bytes wanted.*--mem"):
        raise memory.refusal(4 * GIB)


def test_limits_of_version_1(machine: Path) -> None:
    (machine / "proc" / "self" / "cgroup").write_text("12:cpu,cpuacct:/\n4:memory:/job\n1:name=systemd:/\n")
    files = {"memory__limit_in_bytes": 2 * GIB, "memory__usage_in_bytes": GIB, "memory__stat": "total_active_file 5"}
    group(machine / "sys/fs/cgroup" / "memory" / "job", **files)
    assert free() == GIB + 5


def test_in_a_container(machine: Path) -> None:
    """The group's path is the host's, and the root there is the container's own group."""
    (machine / "proc" / "self" / "cgroup").write_text("4:memory:/docker/abc\n")
    group(machine / "sys/fs/cgroup" / "memory", memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=GIB)
    assert free() == GIB


def test_a_gauge_says_what_a_look_says(machine: Path) -> None:
    """With one system call per file, for whoever asks often."""
    assert kernel.MemoryGauge().read() == kernel.memory() == (99999999 * 1024, 8 * GIB)
    (machine / "proc" / "self" / "cgroup").write_text("4:memory:/job/task\n0::/two\n")
    group(machine / "sys/fs/cgroup/memory/job", memory__limit_in_bytes=6 * GIB, memory__usage_in_bytes=2 * GIB)
    (machine / "sys/fs/cgroup/memory/job/memory.stat").write_text(f"total_active_file {GIB}\ntotal_inactive_file 5\n")
    group(machine / "sys/fs/cgroup/memory/job/task", memory__limit_in_bytes=1 << 62, memory__usage_in_bytes=GIB)
    gauge = kernel.MemoryGauge()
    assert gauge.read() == kernel.memory() == (6 * GIB, 5 * GIB + 5)
    group(machine / "sys/fs/cgroup/two", memory__max=3 * GIB, memory__current=2 * GIB)
    gauge = kernel.MemoryGauge()
    assert gauge.read() == kernel.memory() == (3 * GIB, GIB)
    (machine / "sys/fs/cgroup/two/memory.current").write_text(f"{4 * GIB}\n")
    assert gauge.read() == kernel.memory() == (3 * GIB, 0)
    (machine / "proc/meminfo").write_text("")
    assert gauge.read()[1] == 0
