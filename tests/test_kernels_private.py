"""The directory of the compiled kernels: what is refused, and that what was checked is what is used.

What two users do to each other is tests/system/test_kernel_users.py; here "another user" is this one, seen by a process
that believes to be somebody else.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from pario.kernels import private
from pario.kernels.private import PrivateDirectory, UnsafeError

ME = os.geteuid()
SOMEBODY = 4711


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A directory of ours below a sticky one that everybody may write."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    return shared


def be_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private.os, "geteuid", lambda: SOMEBODY)


def test_it_keeps_what_is_written(base: Path) -> None:
    folder = PrivateDirectory(str(base / "ours" / "state"))
    assert folder.problem() == ""
    with pytest.raises(FileNotFoundError):
        folder.read("a")
    folder.write("a", b"1")
    folder.write("a", b"22")
    assert folder.read("a") == b"22"
    assert os.listdir(base / "ours" / "state") == ["a"]
    for made in (base / "ours", base / "ours" / "state"):
        assert made.stat().st_mode & 0o7777 == 0o700
    assert (base / "ours" / "state" / "a").stat().st_mode & 0o7777 == 0o600


def test_reading_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        PrivateDirectory(str(tmp_path / "a" / "b")).read("x")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777, 0o2775])
def test_a_directory_that_others_may_write(base: Path, mode: int) -> None:
    place = base / "ours"
    place.mkdir()
    folder = PrivateDirectory(str(place))
    folder.write("a", b"1")
    place.chmod(mode)
    with pytest.raises(UnsafeError, match=f"others may write into {place}"):
        folder.read("a")
    with pytest.raises(UnsafeError, match=str(place)):
        folder.write("b", b"1")
    assert str(place) in folder.problem()


def test_a_parent_that_others_may_write_must_be_sticky(base: Path) -> None:
    folder = PrivateDirectory(str(base / "ours"))
    folder.write("a", b"1")
    base.chmod(0o777)
    assert f"others may write into {base} (mode 0777), which is not sticky" in folder.problem()
    base.chmod(0o1777)
    assert folder.problem() == ""


def test_a_link_where_others_may_write(base: Path, tmp_path: Path) -> None:
    """Whoever made it can make it lead elsewhere at any time."""
    (tmp_path / "target").mkdir(mode=0o700)
    (base / "ours").symlink_to(tmp_path / "target")
    folder = PrivateDirectory(str(base / "ours"))
    assert f"{base}/ours is a symbolic link" in folder.problem()
    (tmp_path / "target" / "a").write_bytes(b"1")
    with pytest.raises(UnsafeError, match="symbolic link"):
        folder.read("a")


@pytest.mark.parametrize("target", ["target", "./up/../target", None])
def test_a_link_of_ours_where_nobody_else_may_write(tmp_path: Path, target: str | None) -> None:
    for name in ("target", "up"):
        (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(target or tmp_path / "target")
    PrivateDirectory(str(tmp_path / "link" / "below")).write("a", b"1")
    assert (tmp_path / "target" / "below" / "a").read_bytes() == b"1"
    (tmp_path / "target").chmod(0o777)
    assert "others may write into" in PrivateDirectory(str(tmp_path / "link" / "below")).problem()


def test_a_file_that_is_not_to_be_made(tmp_path: Path) -> None:
    folder = PrivateDirectory(str(tmp_path / "new"))
    with pytest.raises(FileNotFoundError):
        folder.open_file("a", make=False)
    assert not (tmp_path / "new").exists()
    os.close(folder.open_file("a"))
    with pytest.raises(FileNotFoundError):
        folder.open_file("b", make=False)
    os.close(folder.open_file("a", make=False))


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert "more than 40 links" in PrivateDirectory(str(tmp_path / "a")).problem()


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    assert f"{tmp_path}/a is not a directory" in PrivateDirectory(str(tmp_path / "a" / "b")).problem()


def test_directories_of_another_user(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user sees whose name somebody else was quicker to make."""
    folder = PrivateDirectory(str(base / "ours"))
    folder.write("a", b"1")
    be_somebody_else(monkeypatch)
    assert f"belongs to user {ME}" in folder.problem()
    with pytest.raises(UnsafeError, match=f"belongs to user {ME}"):
        folder.read("a")


def test_a_file_that_somebody_else_could_have_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = PrivateDirectory(str(tmp_path))
    for name in ("wide", "twice", "linked", "foreign"):
        folder.write(name, b"1")
    (tmp_path / "wide").chmod(0o620)
    os.link(tmp_path / "twice", tmp_path / "again")
    os.rename(tmp_path / "linked", tmp_path / "target")
    (tmp_path / "linked").symlink_to("target")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "below").mkdir()
    for name, why in (
        ("wide", "may be written by others"),
        ("twice", "has a second name"),
        ("pipe", "no regular file"),
        ("below", "no regular file|directory"),
    ):
        with pytest.raises(OSError, match=why):
            folder.read(name)
        with pytest.raises(OSError):
            folder.open_file(name)
    with pytest.raises(OSError):
        folder.read("linked")
    with pytest.raises(OSError):
        folder.open_file("linked")
    monkeypatch.setattr(private, "_walk", lambda path, make: os.open(path, os.O_PATH))
    be_somebody_else(monkeypatch)
    with pytest.raises(UnsafeError, match=f"foreign belongs to user {ME}"):
        folder.read("foreign")


@pytest.mark.parametrize("at", ["ours", "state"])
def test_a_path_that_changes_after_the_look(base: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """Between the look at a component and its use the name comes to mean something else."""
    folder = PrivateDirectory(str(base / "ours" / "state"))
    folder.write("a", b"ours")
    evil = base / "evil" / "state"
    evil.mkdir(parents=True)
    (evil / "a").write_bytes(b"evil")
    look = private._checked

    def then_swapped(fd: int, path: str, above: os.stat_result | None) -> os.stat_result:
        status = look(fd, path, above)
        if path.endswith(f"/{at}"):
            os.rename(path, f"{path}.away")
            os.symlink(evil.parent if at == "ours" else evil, path)
        return status

    monkeypatch.setattr(private, "_checked", then_swapped)
    assert folder.read("a") == b"ours"
    monkeypatch.undo()
    if at == "ours":  # the next use notices; the other link is in a directory that only we write
        with pytest.raises(UnsafeError, match="symbolic link"):
            folder.read("a")


def test_many_at_once(base: Path) -> None:
    """Threads stand for ranks: all make the directory, write and read one file."""
    folder = PrivateDirectory(str(base / "ours" / "state"))
    start = threading.Barrier(8)
    wrong: list[object] = []

    def use(number: int) -> None:
        start.wait()
        try:
            for _ in range(20):
                folder.write("a", b"%d" % number * 10_000)
                found = folder.read("a")
                if len(set(found)) != 1 or len(found) != 10_000:
                    wrong.append(found)
        except OSError as e:
            wrong.append(e)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert os.listdir(base / "ours" / "state") == ["a"]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = PrivateDirectory(str(tmp_path))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(private.os, "rename", full)
    with pytest.raises(OSError, match="No space"):
        folder.write("a", b"1")
    assert os.listdir(tmp_path) == []


def test_somebody_elses_fuse_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There every owner and mode is what that user says it is."""
    device = os.stat(tmp_path).st_dev
    table = tmp_path / "mountinfo"
    line = "36 35 {}:{} / {} rw,nosuid - {} x rw,user_id={},group_id=0\n"
    kernels_open = open

    def look(path: object, *args: object, **kwargs: object) -> object:
        return kernels_open(table if path == "/proc/self/mountinfo" else path, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(private, "open", look, raising=False)
    place = str(tmp_path / "ours")
    for kind, user, refused in (("fuse.sshfs", SOMEBODY, True), ("fuse", 0, False), ("ext4", SOMEBODY, False)):
        table.write_text(line.format(0, 1, "/", "proc", SOMEBODY))
        with kernels_open(table, "a") as file:
            file.write(line.format(os.major(device), os.minor(device), tmp_path, kind, user))
        assert ("FUSE" in PrivateDirectory(place).problem()) == refused, kind


@pytest.mark.parametrize(
    ("uid_map", "expected"),
    [("         0          0 4294967295\n", -1), ("      1000       1000          1\n", 65534), ("", 65534)],
)
def test_who_owns_the_system_in_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid_map: str, expected: int
) -> None:
    files = {"/proc/self/uid_map": uid_map, "/proc/sys/kernel/overflowuid": "65534\n"}

    def look(path: str) -> object:
        (tmp_path / "file").write_text(files[path])
        return open(tmp_path / "file")

    monkeypatch.setattr(private, "open", look, raising=False)
    assert private._unmapped_owner.__wrapped__() == expected
