"""Tests whose jobs mostly wait (for ranks to be missed, for a farewell) run side by side: those of one file at once.

A test marked `side_by_side` runs in a thread, so it may take what it is parametrized with, `tmp_path`, and fixtures of
its module or session; none that change the process for one test. When the first one of a file is due, all that are
marked begin, a few at a time; each is reported in its turn, as any other test.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import launch
import pytest

#: Jobs at a time: a few interpreters start in each, on what may be two cores; then it sleeps for seconds.
AT_ONCE = 2

#: of one test, or of the whole process: not for threads
FOREIGN = {"capfd", "caplog", "capsys", "monkeypatch", "recwarn", "request"}


class SideBySide:
    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self.folders = folders
        self.pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="side-by-side")
        self.begun: dict[pytest.Function, Future[None]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        if not marked(pyfuncitem):
            return None
        if pyfuncitem not in self.begun:
            for item in pyfuncitem.session.items:
                if isinstance(item, pytest.Function) and item.path == pyfuncitem.path and marked(item):
                    self.begun[item] = self.pool.submit(item.obj, **self.arguments(item, pyfuncitem.funcargs))
        self.begun.pop(pyfuncitem).result()
        return True

    def arguments(self, item: pytest.Function, shared: dict[str, Any]) -> dict[str, Any]:
        """What a test is called with whose own turn has not come yet."""
        own = item.callspec.params if hasattr(item, "callspec") else {}
        names = set(inspect.signature(item.obj).parameters)
        assert not names & FOREIGN, f"{item.nodeid} runs in a thread: it cannot take {', '.join(names & FOREIGN)}"
        folder = {"tmp_path": self.folders.mktemp(item.originalname[:30])} if "tmp_path" in names else {}
        return {name: ({**shared, **own} | folder)[name] for name in names}


def marked(item: pytest.Item) -> bool:
    return item.get_closest_marker("side_by_side") is not None


@pytest.fixture(scope="session", autouse=True)
def side_by_side(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    plugin = SideBySide(tmp_path_factory)
    request.config.pluginmanager.register(plugin)
    yield
    plugin.pool.shutdown(wait=False, cancel_futures=True)
    launch.kill_all()  # nothing is left to do, unless the run was interrupted
    request.config.pluginmanager.unregister(plugin)
