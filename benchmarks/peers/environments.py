"""One virtual environment per peer, so that their requirements cannot clash. Nothing but the standard library.

What cannot be installed is left out of the tables with the reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.table import PEERS, Peer

__all__ = ["OWN", "install", "installed"]

ROOT = Path(__file__).resolve().parents[2]
OWN = "pario"
_OWN_NEEDS = (f"{ROOT}[figures,image,latency-store,mpich]", "scikit-learn", "scikit-image", "pillow", "lmdb>=1.4")
_LIMIT_S = 1800


def _made(folder: Path, needs: tuple[str, ...], editable: bool = False) -> str:
    """Make the environment unless it is there; returns "" or why it could not be made."""
    marker = folder / "installed.json"
    if marker.exists() and json.loads(marker.read_text()) == list(needs):
        return ""
    print(f"installing {folder.name}: {' '.join(needs)}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    command += [*(("-e",) if editable else ()), *needs]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
        said, failed = done.stderr or done.stdout, done.returncode != 0
    except subprocess.TimeoutExpired:
        said, failed = f"pip did not end within {_LIMIT_S} s", True
    if not failed:
        marker.write_text(json.dumps(list(needs)))
        return ""
    (folder / "pip.log").write_text(said)
    lines = [line.strip() for line in said.splitlines() if "error" in line.lower() and "subprocess" not in line]
    return (lines or said.strip().splitlines() or ["pip failed"])[-1][:200]


def install(out: Path, only: list[str] | None) -> None:
    """All environments below `out`/env; `out`/left_out.json names the peers that cannot be installed, and why."""
    out.mkdir(parents=True, exist_ok=True)
    failed = _made(out / "env" / OWN, _OWN_NEEDS, editable=True)
    if failed:
        raise SystemExit(f"pario itself cannot be installed: {failed}")
    file = out / "left_out.json"
    left_out = json.loads(file.read_text()) if file.exists() else {}
    for peer in PEERS:
        if peer.pip and (only is None or peer.module in only):
            why = _made(out / "env" / peer.module, peer.pip)
            left_out.pop(peer.module, None)
            if why:
                wants = f"; it also needs the Debian packages {' '.join(peer.apt)}" if peer.apt else ""
                left_out[peer.module] = why + wants
    file.write_text(json.dumps(left_out, indent=1) + "\n")


def installed(out: Path, peer: Peer) -> str | None:
    """The interpreter that runs this peer; None: it has none."""
    python = out / "env" / peer.module / "bin" / "python"
    if not peer.pip:
        return sys.executable
    return str(python) if (python.parent.parent / "installed.json").exists() else None


def own_python(out: Path) -> str:
    return os.fspath(out / "env" / OWN / "bin" / "python")
