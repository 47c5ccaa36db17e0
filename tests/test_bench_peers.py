"""What benchmarks/peers tells of other loaders: mixing, exactly once, right bytes, from delivered records alone."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest

from benchmarks.peers import __main__ as command
from benchmarks.peers.judging import PIXELS, Truth, judge, mixing, numbers_of, stamp
from benchmarks.peers.reading import cpu_seconds
from benchmarks.peers.table import PEERS, variants

N, BATCH = 4096, 64


def batches(order: np.ndarray, ranks: int = 1) -> list[list[list[int]]]:
    """Each rank's batches of an order: global batch k is divided among the ranks."""
    steps = order.reshape(-1, ranks, BATCH)
    return [[step[rank].tolist() for step in steps] for rank in range(ranks)]


def pictures(numbers: list[int]) -> np.ndarray:
    found = np.random.default_rng(5).integers(96, 160, (len(numbers), PIXELS // 32, PIXELS // 32, 3), np.uint8)
    found = found.repeat(32, 1).repeat(32, 2)  # what JPEG keeps
    for row, number in zip(found, numbers, strict=True):
        stamp(row, number)
    return found


def test_mixing_is_the_variance_within_batches() -> None:
    assert mixing(np.arange(N).reshape(-1, BATCH), N) < 0.001
    shuffled = np.random.default_rng(1).permutation(N)
    assert mixing(shuffled.reshape(-1, BATCH), N) > 0.98
    # By hand: two batches of 0, 1 and of 2, 3: variance 1/2 within, 5/3 in all.
    assert mixing(np.array([[0, 1], [2, 3]]), 4) == pytest.approx(0.3)
    assert mixing(np.array([[0, 3], [1, 2]]), 4) == 1  # (4.5 + 0.5) / 2 is more than 5/3: cut off


def test_mixing_is_that_of_the_global_batch() -> None:
    told = judge(batches(np.arange(N), ranks=2), N)
    assert told.mixing == pytest.approx(mixing(np.arange(N).reshape(-1, 2 * BATCH), N))


@pytest.mark.parametrize("ranks", [1, 2])
def test_exactly_once(ranks: int) -> None:
    order = np.random.default_rng(2).permutation(N)
    told = judge(batches(order, ranks), N)
    assert told.exactly_once
    assert (told.records, told.batches) == ([N // ranks] * ranks, [N // BATCH // ranks] * ranks)


def test_what_is_not_exactly_once() -> None:
    order = np.arange(N)
    order[7] = 8
    told = judge(batches(order), N)
    assert (told.missing, told.repeated, told.exactly_once) == (1, 1, False)
    assert judge([[[0, 1, 2]]], 4).missing == 1
    assert judge([[[0, 1, 2, 3, 3, 3]]], 4).repeated == 2
    assert judge([[[0, 1, 2, 3]], [[0]]], 4).repeated == 1  # by another rank
    assert judge([[[0, 1, 2, 3, 77]]], 4).repeated == 1  # a number that no record bears
    assert not judge([[[0, 1, 2, 3]]], 4, wrong=1).exactly_once
    assert judge([[]], 4).missing == 4


def test_an_incomplete_last_batch_does_not_count_for_mixing() -> None:
    assert judge([[[0, 1], [2, 3], [4]]], 5).mixing == pytest.approx(0.5 / 2.5)


def test_a_raw_record_bears_its_number_and_all_its_bytes_count() -> None:
    records = np.random.default_rng(3).integers(0, 256, (9, 100), np.uint8)
    for number, record in enumerate(records):
        stamp(record, number)
    truth = Truth(Truth.of(list(records)))
    order = [4, 0, 8, 4]
    batch = records[order].copy()
    assert numbers_of(batch).tolist() == order
    assert truth.right(batch).all()
    batch[1, 99] ^= 1
    batch[2, :8] = 255  # a number that no record bears
    assert truth.right(batch).tolist() == [True, False, False, True]


def test_a_picture_bears_its_number_through_jpeg() -> None:
    image = pytest.importorskip("PIL.Image")
    numbers = [0, 1, 2047, 65535]
    made = pictures(numbers)
    through = []
    for one in made:
        file = io.BytesIO()
        image.fromarray(one).save(file, "JPEG", quality=90)
        through.append(np.asarray(image.open(file)))
    assert numbers_of(np.stack(through)).tolist() == numbers
    known = pictures([0, 1, 2])
    truth = Truth(Truth.of(list(known)))
    assert truth.right(np.stack(through)[:2]).all()
    other = known.copy()
    other[0, 100:] = 0  # as if the file had ended there
    assert truth.right(other).tolist() == [False, True, True]


def test_every_peer_has_a_file_of_its_own() -> None:
    from importlib.util import find_spec

    for peer in PEERS:
        assert find_spec(f"benchmarks.peers.{peer.module}") is not None, peer
    keys = [one.key for one in variants()]
    assert len(set(keys)) == len(keys)
    assert [one.key for one in variants(["ffcv", "pario:block"])] == ["pario:block", "ffcv"]


@pytest.mark.parametrize(
    ("more", "said"), [([], "pip install no-such-thing"), (["--part", "fill"], "--smoke has the parts check and speed")]
)
def test_a_smoke_run_says_what_it_lacks(
    more: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["peers", "--smoke", *more])
    monkeypatch.setitem(command.SMOKE_NEEDS, "no_such_thing", "no-such-thing")
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_cpu_seconds_count_children_that_live_and_that_ended() -> None:
    import subprocess

    before = cpu_seconds()
    busy = "import time\nwhile time.process_time() < 0.3: pass\n"
    subprocess.run([sys.executable, "-c", busy], check=True, timeout=60)
    with subprocess.Popen([sys.executable, "-c", busy + "print(flush=True); input()"], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert cpu_seconds() - before > 0.55
        child.communicate(b"\n", timeout=60)
