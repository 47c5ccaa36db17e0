"""Two users of one machine: what one of them plants where both may write is never executed by the other.

Root starts both. The victim runs the script as it is, first with a look at the directory of its compiled kernels and
later with a first use of one; the attacker knows all names, and changes what they lead to in between.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from required import skip_or_fail

ROOT = Path(__file__).resolve().parent.parent.parent
VICTIM, ATTACKER = 4711, 4712

#: A look at the directory, a wait for a line, and the first use of a kernel.
SCRIPT = """
import sys
from pario.kernels import jit
from pario.kernels.permute import absorb
getattr(jit, "tell_cache_problem", int)()
print(jit.cache_directory(), flush=True)
sys.stdin.readline()
print(absorb(1, 2), flush=True)
"""
SAID = "2092789425003139053"  # absorb(1, 2)


class Payload:
    """Unpickled, it leaves a file that tells who did it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (exec, (f"import os; open({str(self.mark)!r}, 'a').write(f'{{os.geteuid()}} ')",))


def command(user: int) -> list[str]:
    """Python as that user, who may read (and not write) whatever this interpreter needs, wherever root has put it."""
    setpriv = shutil.which("setpriv") or skip_or_fail("no setpriv to become another user")
    reads = "+dac_read_search"
    ids = [f"--reuid={user}", f"--regid={user}", "--clear-groups", f"--inh-caps={reads}", f"--ambient-caps={reads}"]
    return [str(setpriv), *ids, sys.executable, "-c", SCRIPT]


def environment(temporary: Path, **more: str) -> dict[str, str]:
    own = {k: v for k, v in os.environ.items() if k not in ("PARIO_NUMBA_CACHE", "NUMBA_CACHE_DIR", "HOME", "LOGNAME")}
    return {**own, "PYTHONPATH": str(ROOT), "USER": "victim", "TMPDIR": str(temporary), **more}


def own(place: Path, user: int) -> None:
    for path in (place, *place.rglob("*")):
        os.chown(path, user, user, follow_symlinks=False)


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A TMPDIR as everybody has it: sticky, and everybody may write."""
    if os.geteuid() != 0:
        skip_or_fail("starting processes of two other users takes root")
    place = Path("/tmp") / f"pario-two-users-{os.getpid()}"
    place.mkdir()
    place.chmod(0o1777)
    yield place
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def evil(temporary: Path) -> Path:
    """The attacker's directory: under each name that a kernel's cache has, the payload."""
    place = temporary / "evil"
    place.mkdir()
    own(place, ATTACKER)
    subprocess.run(
        command(ATTACKER), env=environment(temporary, PARIO_NUMBA_CACHE=str(place)), input="\n", text=True, check=True
    )
    payload = pickle.dumps(Payload(temporary / "executed-by"))
    names = [path for path in place.rglob("*") if path.suffix in (".nbi", ".nbc")]
    assert names
    for path in names:
        # As Numba writes it, or as pario does, with the digest that says that it is whole.
        path.write_bytes(payload if path.suffix == ".nbi" else hashlib.sha256(payload).digest() + payload)
    for path in (place, *place.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return place


def link(place: Path, target: Path) -> None:
    """As the attacker: a link, in place of an earlier one."""
    half = place.with_suffix(".half")
    half.symlink_to(target)
    os.chown(half, ATTACKER, ATTACKER, follow_symlinks=False)
    half.rename(place)


@pytest.mark.parametrize("how", ["link", "squatted", "wide", "once wide", "named"])
def test_no_payload_of_another_user_is_executed(how: str, temporary: Path, evil: Path) -> None:
    mine = temporary / "home"
    mine.mkdir(mode=0o700)
    own(mine, VICTIM)
    mark = temporary / "executed-by"
    mark.touch()
    mark.chmod(0o666)
    # By the name, as it was once, or by the number.
    names = [temporary / f"pario-numba-{who}" for who in ("victim", VICTIM)]
    env = environment(temporary)
    for name in names:
        if how == "link":
            link(name, mine)  # a good place, as long as anybody looks
            continue
        shutil.copytree(evil, name)
        own(name, ATTACKER)
        if how != "squatted":
            for path in filter(Path.is_dir, (name, *name.rglob("*"))):
                os.chown(path, VICTIM, VICTIM)
                path.chmod(0o700 if how == "once wide" else 0o777)
    if how == "named":
        env["PARIO_NUMBA_CACHE"] = str(names[0])
    try:
        victim = subprocess.Popen(
            command(VICTIM), env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert victim.stdout is not None
        looked = victim.stdout.readline().strip()
        if how == "link":
            for name in names:
                link(name, evil)
        said, complained = victim.communicate("\n", timeout=60)
        assert mark.read_text() == "", f"executed: {complained}"
        assert (victim.returncode, said.strip()) == (0, SAID), complained
        if how == "once wide":
            assert complained == "pario's kernels are compiled, once on this machine: up to a minute\n"
            replaced = [path for path in Path(looked).iterdir() if path.stat().st_uid == VICTIM]
            assert any(path.suffix == ".nbc" for path in replaced)
        else:
            (line,) = complained.strip().splitlines()
            blamed = names[0] if how == "named" else names[1]
            assert "not kept" in line
            assert str(blamed) in line
    finally:
        for name in (*names, mine):
            if name.is_symlink():
                name.unlink()
            else:
                shutil.rmtree(name)
        mark.unlink()
