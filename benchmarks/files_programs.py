"""Random programs with and without a view, and supervisors that are killed: nothing may differ, crash or hang.

    python -m benchmarks.files_programs [--programs 1000] [--packed] [--kills 50] [--seed 0]

--programs: commands of coreutils, findutils, tar, grep, sed, dash, bash and, if it is there, busybox, drawn at random,
run on a real folder and on a view of the same files; half of them look at the view, the others at a real folder. Exit
status and output must be the same. --packed: the view is of what `pario data pack` made of the folder, which has links,
empty folders, modes, times, a git repository with a Makefile, and scripts; what differs is told. --kills: `cp -r` and a
pipeline whose supervisor dies by SIGKILL at random moments: everything must end, and what was copied or summed must be
right.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import lmdb

#: what the programs are run by, natively and under the view: commands from a file, results to a file
DRIVER = """
import hashlib, json, subprocess, sys
done = []
for command in json.load(open(sys.argv[1])):
    try:
        run = subprocess.run(command, shell=False, capture_output=True, timeout=60, stdin=subprocess.DEVNULL)
        outputs = [each.decode("latin-1").replace(sys.argv[3], "@") for each in (run.stdout, run.stderr)]
        done.append([run.returncode, *outputs])
    except subprocess.TimeoutExpired:
        done.append(["hangs", "", ""])
json.dump(done, open(sys.argv[2], "w"))
"""

READERS = [
    "cat {f}", "head -n 3 {f}", "tail -c 100 {f}", "wc {f}", "md5sum {f}", "sha1sum {f}", "cksum {f}",
    "od -An -c {f}", "sort {f}", "cut -c1-5 {f}", "grep -c a {f}", "sed -n 2p {f}", "tac {f}", "rev {f}",
    "fold -w 30 {f}", "nl {f}", "base64 {f}", "cmp {f} {g}", "diff -q {f} {g}", "comm {f} {g}", "paste {f} {g}",
    "dd if={f} bs=7 count=9 status=none", "cat {f} {g}", "head -c 1000 {f} {g}", "tail -n 2 {f}", "expand {f}",
    "uniq {f}", "strings {f}", "split -b 9k --filter=wc {f}",
]  # fmt: skip
LOOKERS = [
    "ls -1 {d}", "ls -a {d}", "ls -1RF {d}", "find {d} | sort", "find {d} -type f | sort", "find {d} -type d | sort",
    "find {d} -size +4k | sort", "stat -c %s:%A:%F:%h {f}", "stat -c %A:%F {d}", "test -e {f}", "test -d {f}",
    "test -r {f}", "test -x {f}", "ls {missing}", "cat {missing}", "cat {f}/x", "cat {d}", "realpath {f}",
    "readlink -f {f}", "readlink {f}", "basename {f}", "ls -l {missing}", "stat -c %s {f} {g}",
    "find {d} -name '*1*' | sort", "du -b {f}", "file -b {f}", "ls -1 {f}",
]  # fmt: skip
PIPES = [
    "cat {f} | wc -c", "tar cf - -C {d} . | tar tf - | sort", "tar cf - --sort=name -C {d} . | tar xOf - | md5sum",
    "cd {d} && ls | head -3", "cd {d} && cat * 2>/dev/null | md5sum", "for x in {d}/*; do echo $x; done",
    "wc -c < {f}", "find {d} -type f | sort | xargs md5sum", "cat {f} | (read x; echo $x | wc -c)",
    "cd {d}/.. && pwd && ls", "cp -r {d} $T/copy && find $T/copy -type f | sort | xargs cat | md5sum; rm -rf $T/copy",
    "[ -f {f} ] && echo yes || echo no", "cp {f} $T/one && cmp {f} $T/one; rm -f $T/one",
    "exec 3< {f}; head -c 5 <&3; cat <&3 | md5sum", "(cd {d}; cat ./*) 2>&1 | wc",
    "while read a; do echo $a; break; done < {f}", "cat {f} > $T/two; wc -c $T/two; rm $T/two",
    "cd {d} && cat ../$(basename {d})/* 2>&1 | wc -c", "diff -r {d} {d} && echo same",
    "echo $(cat {f} | head -c 20 | od -An -x)", "cat {missing} || echo none", "cd {missing} || pwd",
]  # fmt: skip
TREES = [
    "find {d} -type d -printf '%P %m %T@\\n' | sort", "find {d} ! -type d -printf '%P %y %m %n %s %l %T@\\n' | sort",
    "find {d} -type d -empty | sort", "ls -F {d}", "readlink {l}", "cat {l} | md5sum", "stat -Lc %A:%Y:%F {l}",
    "stat -c %N:%s:%A:%Y {l}", "test -L {l}", "test -x {f}", "cp -a {l} $T/l; readlink $T/l; rm -fr $T/l",
    "find -L {d} -type f | sort", "find {d} -samefile {f} | sort", "realpath {l}", "sh {repo}/go", "{repo}/run {l}",
    "cd {l}; pwd -P", "(tar cf - --sort=name -C {d} . | tar tvf - --full-time) 2>/dev/null",
    "git -C {repo} --no-optional-locks status --short", "git -C {repo} log --oneline", "git -C {repo} fsck",
    "make -s -n -C {repo}", "make -s -C {repo} print", "git clone -q {repo} $T/clone && ls -A $T/clone; rm -r $T/clone",
]  # fmt: skip
LINKS = {"l0": "one", "a/l1": "../one", "l2": "a/b", "c/l3": "nowhere", "l4": "a/l1", "c/l5": "l5", "l6": "."}
REPOSITORY = """git init -q repo && cd repo && printf 'all: a\\na: b.c\\n\\techo compile\\nprint:\\n\\t./run' > Makefile
touch b.c; printf '#!/bin/sh\\necho ran $#\\n' > run; chmod 755 run; ln -s run go; git add -A
git -c user.name=a -c user.email=a@b commit -qm one && git gc -q"""
BUSYBOX = {"strings", "expand", "split", "file", "realpath", "base64"}


def contents(rng: random.Random) -> dict[str, bytes]:
    """Files by path: text and binary, empty and larger than a page."""
    files = {"empty": b"", "one": b"\n"}
    for k in range(40):
        folder = rng.choice(["", "a/", "a/b/", "c/", "d e/"])
        text = "\n".join("".join(rng.choices("abc defg", k=rng.randrange(60))) for _ in range(rng.randrange(200)))
        data = text.encode() if k % 2 else rng.randbytes(rng.randrange(99000))
        files[f"{folder}f{k}.{rng.choice(['txt', 'bin'])}"] = data
    return files


def write_lmdb(path: Path, files: dict[str, bytes]) -> None:
    with lmdb.open(str(path), map_size=1 << 28) as env, env.begin(write=True) as txn:
        for name, data in files.items():
            txn.put(name.encode(), data)


def write_folder(path: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
        (path / name).chmod(0o444)
    for each, _, _ in os.walk(path):
        os.chmod(each, 0o755)


def furnish(path: Path, files: dict[str, bytes], rng: random.Random) -> None:
    """Links, empty folders, modes and times, and a repository."""
    for name in files:
        (path / name).chmod(rng.choice([0o444, 0o644, 0o755]))
        os.utime(path / name, ns=(0, rng.randrange(10**18)))
    for name in ("nothing here", "a/empty/too"):
        (path / name).mkdir(parents=True)
    for name, to in LINKS.items():
        os.symlink(to, path / name)
    os.link(path / "one", path / "a" / "one too")
    subprocess.run(["sh", "-ec", REPOSITORY], cwd=path, check=True)
    for each, _, _ in os.walk(path):
        os.chmod(each, rng.choice([0o755, 0o700]))


def commands(
    rng: random.Random, count: int, files: dict[str, bytes], seen: str, other: str, forms: list[list[str]]
) -> list[list[str]]:
    """seen : the folder that half of the commands use; other : that of the rest"""
    shells = [["sh", "-c"], ["bash", "-c"]] + ([["busybox", "sh", "-c"]] if shutil.which("busybox") else [])
    folders = sorted({str(Path(name).parent) for name in files})
    done = []
    for k in range(count):
        base = seen if k % 2 else other
        quoted = {
            "f": f"'{base}/{rng.choice(sorted(files))}'",
            "g": f"'{base}/{rng.choice(sorted(files))}'",
            "d": f"'{os.path.normpath(base + '/' + rng.choice(folders))}'",
            "l": f"'{base}/{rng.choice(sorted(LINKS))}'",
            "repo": f"'{base}/repo'",
            "missing": f"'{base}/{rng.choice(['nothing', 'a/nothing', 'x/y/z'])}'",
        }
        form = rng.choice(rng.choice(forms))
        text, shell = form.format(**quoted), rng.choice(shells)
        if shell[0] == "busybox" and form in READERS and form.split()[0] not in BUSYBOX:
            text = "busybox " + text
        done.append([*shell, text])
    return done


def compare_programs(count: int, seed: int, packed: bool = False) -> list[str]:
    """What differs, crashes or hangs, one line each."""
    rng, forms = random.Random(seed), [READERS, LOOKERS, PIPES, *[TREES] * packed]
    with tempfile.TemporaryDirectory() as top_name:
        top = Path(top_name).resolve()
        files = contents(rng)
        for name in ("real", "scratch"):
            (top / name).mkdir()
        write_folder(top / "real" / "base", files)
        if packed:
            furnish(top / "real" / "base", files, rng)
            pack = ["data", "pack", f"{top}/real/base", f"{top}/set.lmdb", "--links", "keep"]
            subprocess.run([sys.executable, "-m", "pario", *pack], check=True, stdout=subprocess.DEVNULL)
        else:
            write_lmdb(top / "set.lmdb", files)
        subprocess.run(["cp", "-a", top / "real", top / "other"], check=True)
        (top / "view" / "base").mkdir(parents=True)
        results = []
        for name, before in (
            ("real", []),
            ("view", [sys.executable, "-m", "pario", "files", "view", f"{top}/set.lmdb={top}/view/base", "--"]),
        ):
            drawn = commands(random.Random(seed + 1), count, files, f"{top}/{name}/base", f"{top}/other/base", forms)
            (top / "commands").write_text(json.dumps(drawn))
            subprocess.run(
                [*before, sys.executable, "-c", DRIVER, f"{top}/commands", f"{top}/results", f"{top}/{name}"],
                check=True, timeout=3600, env={**os.environ, "T": f"{top}/scratch", "LC_ALL": "C"},
            )  # fmt: skip
            results.append(json.loads((top / "results").read_text()))
        return [
            f"{command}: {one} {other}"
            for command, one, other in zip(drawn, *results, strict=True)
            if one != other or one[0] == "hangs"
        ]


SUMS = "for f in $(find /%s -type f | sort); do md5sum < $f | cut -c1-32 | sed \"s#^#$f #\"; done"


def kill_supervisors(count: int, seed: int) -> list[str]:
    """What hangs or is wrong after the supervisor was killed, one line each."""
    rng = random.Random(seed)
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as top_name:
        top = Path(top_name).resolve()
        files = {f"f{k:03d}": rng.randbytes(rng.randrange(1, 200_000)) for k in range(150)}
        write_lmdb(top / "set.lmdb", files)
        for k in range(count):
            wrong += [f"{k}: {each}" for each in _kill_one(top, files, rng, copies=k % 2 == 0)]
    return wrong


def _kill_one(top: Path, files: dict[str, bytes], rng: random.Random, copies: bool) -> list[str]:
    out, view, begun = top / "out", top / "view", top / "begun"
    out.mkdir()
    program = f"cp -r {view} {out}/copy" if copies else (SUMS % str(view)[1:]) + f" > {out}/sums"
    words = [sys.executable, "-m", "pario", "files", "view", f"{top}/set.lmdb={view}", "--", "sh", "-c"]
    words.append(f": > {begun}; {program}")
    run = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    end = time.monotonic() + 60
    while not begun.exists() and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(rng.random() * (0.06 if copies else 1.0))
    wrong = []
    for child in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)
    try:
        run.wait(30)
    except subprocess.TimeoutExpired:
        wrong.append("hangs")
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    for path in (out / "copy").rglob("*"):
        if path.is_file() and path.read_bytes() not in (files[path.name], b""):
            wrong.append(f"{path.name} is wrong")
    sums = (out / "sums").read_text().splitlines() if (out / "sums").exists() else []
    for line in sums:
        name, _, found = line.partition(" ")
        # A program of the pipeline that cannot open anything sums nothing.
        if found and found != hashlib.md5(files[os.path.basename(name)]).hexdigest():
            wrong.append(f"the sum of {name} is wrong: {found}")
    shutil.rmtree(out)
    begun.unlink(missing_ok=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", type=int, default=0)
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    wrong = compare_programs(given.programs, given.seed, given.packed) + kill_supervisors(given.kills, given.seed)
    print(f"{given.programs} programs, {given.kills} kills, {len(wrong)} wrong", *wrong[:20], sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
