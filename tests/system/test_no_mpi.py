"""Ranks without MPI on hosts with a network of their own (namespaces joined by veth), and under a real Slurm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import slurm
import test_comm_star as star
from launch import Job, left_segments, segments
from pace import Pace
from required import skip_or_fail

HOSTS = 4
SYSTEM = os.environ.get("PARIO_REQUIRE_SYSTEM") == "1"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = str(tmp_path_factory.mktemp("hosts") / "x.lmdb")
    with lmdb.open(made, map_size=1 << 24) as env, env.begin(write=True) as txn:
        for i in range(star.N):
            txn.put(b"%06d" % i, np.random.default_rng(i).bytes(100 + i * 70))
    return made


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    """Names of network namespaces, 10.77.0.1 to 10.77.0.4, on one switch that leads nowhere else."""
    if not SYSTEM:
        pytest.skip("makes network namespaces: set PARIO_REQUIRE_SYSTEM=1 and be root")
    names = [f"pario{os.getpid()}-{k}" for k in range(HOSTS + 1)]
    switch = names[0]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)

    try:
        try:
            for name in names:
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            ip("-n", switch, "link", "add", "switch", "type", "bridge")
            ip("-n", switch, "link", "set", "switch", "up")
            for k, name in enumerate(names[1:], 1):
                ip("-n", switch, "link", "add", f"port{k}", "type", "veth", "peer", "name", "eth0", "netns", name)
                ip("-n", switch, "link", "set", f"port{k}", "master", "switch", "up")
                ip("-n", name, "address", "add", f"10.77.0.{k}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
                ip("-n", name, "route", "add", "default", "via", "10.77.0.254")
        except (OSError, subprocess.CalledProcessError) as e:
            skip_or_fail(f"no network namespaces: {e} {getattr(e, 'stderr', '')}")
        yield names[1:]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20, check=False)


Train = Callable[..., tuple[Job, list[dict[str, Any]]]]


@pytest.fixture
def train(hosts: list[str], path: str, tmp_path: Path) -> Train:
    """train(ranks on each host, rank that dies, variables): as `test_comm_star.train`."""

    def run(each: int = 1, dies: int = -1, **more: str) -> tuple[Job, list[dict[str, Any]]]:
        size, before, pace = HOSTS * each, segments(), Pace()
        started = []
        for rank in range(size):
            env = dict(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="10.77.0.1", MASTER_PORT="29500")
            env |= {"PYTHONPATH": str(star.ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")} | more
            argv = [sys.executable, "-c", star.WITHOUT + star.TRAIN, path, "null", "-1", str(dies)]
            started.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", hosts[rank // each], *argv],
                    env={**os.environ, **env},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        try:
            output = "".join(process.communicate(timeout=60)[0] for process in started)
        finally:
            for process in started:
                process.kill()
        status = next((process.returncode for process in started if process.returncode), 0)
        assert left_segments(before) == set(), output
        pace.sample()
        said = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        return Job(status, output, 0.0, 0.0, pace.slowness), sorted(said, key=lambda words: words.get("rank", -1))

    return run


@pytest.mark.parametrize("how", ["a shared folder", "a secret of each host", "a port of the user's"])
def test_hosts_with_a_network_of_their_own(train: Train, path: str, tmp_path: Path, how: str) -> None:
    more = {}
    if how != "a shared folder":
        (tmp_path / "secret").write_bytes(os.urandom(20).hex().encode())
        (tmp_path / "secret").chmod(0o600)
        more = {"PARIO_SECRET_FILE": str(tmp_path / "secret")}
    if how == "a port of the user's":
        more["PARIO_RENDEZVOUS"] = "10.77.0.1:7777"
    each = 2 if how == "a shared folder" else 1
    done, said = train(each, **more)
    assert done.status == 0, done.output
    assert [(words["size"], words["nodes"], words["node"]) for words in said] == [
        (HOSTS * each, HOSTS, rank // each) for rank in range(HOSTS * each)
    ]
    star.check_epoch(path, said)


@pytest.mark.parametrize("dies", [0, 3])
def test_a_host_whose_rank_is_killed(train: Train, dies: int) -> None:
    star.check_death(*train(dies=dies), dies, HOSTS)


def test_srun_where_no_mpi_is_installed(path: str, tmp_path: Path) -> None:
    """And where one is, which sees nobody, as srun starts the ranks for none."""
    if not SYSTEM:
        pytest.skip("starts a Slurm of its own: set PARIO_REQUIRE_SYSTEM=1 and be root")
    try:
        with slurm.cluster() as made:
            for number, without in enumerate((star.WITHOUT, "")):
                script, output = tmp_path / "train.py", tmp_path / f"said{number}-%t"
                script.write_text(without + star.TRAIN)
                words = f"srun --mpi=none --output={output} {sys.executable} {script} {path} null -1 -1"
                env = {"PYTHONPATH": str(star.ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
                job = ("--nodes=4", "--ntasks-per-node=1", "--cpus-per-task=1", f"--wrap={words}")
                ended = made.run(*job, cwd=tmp_path, limit_s=90, env=env)
                files = [tmp_path / f"said{number}-{rank}" for rank in range(4)]
                texts = [file.read_text() if file.exists() else "" for file in files]
                assert ended.state == "COMPLETED", f"{ended.output}{texts}"
                said = [json.loads(text[text.index("{") :]) for text in texts]
                assert [(words["rank"], words["size"], words["nodes"]) for words in said] == [
                    (rank, 4, 4) for rank in range(4)
                ]
                star.check_epoch(path, said)
    except slurm.Unavailable as reason:
        skip_or_fail(f"no Slurm: {reason}")
