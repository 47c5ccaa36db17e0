"""What cannot run on this machine is skipped with a reason, or is a failure where everything must run."""

from __future__ import annotations

import importlib.util
import os

import pytest


def skip_or_fail(reason: str) -> None:
    """CI sets PARIO_REQUIRE_SYSTEM=1: there a skip that nobody sees would be a test that nobody has."""
    if os.environ.get("PARIO_REQUIRE_SYSTEM") == "1":
        pytest.fail(f"PARIO_REQUIRE_SYSTEM=1, but {reason}")
    pytest.skip(reason)


def framework(name: str) -> None:
    """Skip what needs this module if it is not installed; a failure where PARIO_REQUIRE_FRAMEWORKS=1."""
    if importlib.util.find_spec(name) is None:
        if os.environ.get("PARIO_REQUIRE_FRAMEWORKS") == "1":
            pytest.fail(f"PARIO_REQUIRE_FRAMEWORKS=1, but {name} is not installed")
        pytest.skip(f"{name} is not installed (.ci/run makes an environment with it)")
