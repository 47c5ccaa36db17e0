"""Tests of the machine's own parts: block devices, control groups, published files. Run by .ci/run as root."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from memory_groups import MemoryGroup
from required import skip_or_fail

from benchmarks import cache
from benchmarks.stores import throttled
from benchmarks.stores.latency import LatencyStore, latency_store

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))  # benchmarks/ is a folder of the repository, not of the installed package


@pytest.hookimpl(tryfirst=True)  # before pytest looks at -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.system)


@pytest.fixture
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[throttled.Disk]:
    """An empty file system of 200 MB on a device of its own, whose reads are counted; gone after the test."""
    if os.environ.get("PARIO_REQUIRE_SYSTEM") != "1":  # nobody who runs the tests as root is mounted at by surprise
        pytest.skip("mounts a loop device: set PARIO_REQUIRE_SYSTEM=1 and be root")
    place = os.environ.get("PARIO_SYSTEM_DIR") or str(tmp_path_factory.mktemp("disk"))
    try:
        context = throttled.throttled_disk(place, 200 << 20)
        made = context.__enter__()
    except cache.Unavailable as reason:
        skip_or_fail(f"no block device of our own: {reason}")
        raise
    try:
        try:
            with throttled.Group(made.device):
                pass
        except cache.Unavailable as reason:
            skip_or_fail(f"reads cannot be counted: {reason}")
        yield made
    finally:
        context.__exit__(None, None, None)


@pytest.fixture
def slow() -> Iterator[Callable[..., LatencyStore]]:
    """slow(folder, ...): that folder behind a FUSE mount with latency; unmounted after the test."""
    with ExitStack() as stack:

        def mount(folder: str | os.PathLike[str], **options: Any) -> LatencyStore:
            try:
                return stack.enter_context(latency_store(folder, **options))
            except cache.Unavailable as reason:
                skip_or_fail(f"no FUSE mount: {reason}")
                raise

        yield mount


@pytest.fixture
def memory_group() -> Iterator[Callable[[int], MemoryGroup]]:
    """memory_group(bytes): a control group with this memory limit; gone after the test."""
    with ExitStack() as stack:

        def make(nbytes: int) -> MemoryGroup:
            try:
                made = MemoryGroup(nbytes)
            except OSError as reason:
                skip_or_fail(f"no control group with a memory limit can be made: {reason}")
                raise
            stack.callback(made.remove)
            return made

        yield make
