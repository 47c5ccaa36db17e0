"""benchmarks/cuda.py: on a device, where there is one; its code without one."""

from __future__ import annotations

import pytest
from required import framework

from benchmarks import cuda


@pytest.mark.cuda
def test_on_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    if not cuda.devices():
        pytest.skip("no torch, or no CUDA device that it finds")
    assert cuda.main(["--records", "500", "--rounds", "1"]) == 0, capsys.readouterr().out


def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "devices", lambda: 0)
    assert cuda.main([]) == 0
    assert capsys.readouterr().out == "no torch, or no CUDA device that it finds: nothing is measured\n"


@pytest.mark.frameworks
def test_its_code_runs_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    framework("torch")
    assert cuda.main(["--records", "200", "--rounds", "1", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    for ranks in (1, 2):
        assert f"{ranks} rank(s): yes  every record comes once" in said
    assert "ms per batch of 64  Loader(device=)" in said
    assert "NO" not in said
