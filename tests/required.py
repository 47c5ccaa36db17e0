"""What cannot run on this machine is skipped with a reason, or is a failure where everything must run."""

from __future__ import annotations

import os

import pytest


def skip_or_fail(reason: str) -> None:
    """CI sets PARIO_REQUIRE_SYSTEM=1: there a skip that nobody sees would be a test that nobody has."""
    if os.environ.get("PARIO_REQUIRE_SYSTEM") == "1":
        pytest.fail(f"PARIO_REQUIRE_SYSTEM=1, but {reason}")
    pytest.skip(reason)
