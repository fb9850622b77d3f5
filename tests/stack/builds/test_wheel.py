# SPDX-License-Identifier: Apache-2.0
"""Wheels: every build gives the same bytes, and the reader trusts nothing."""

import hashlib
import io
import random
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from shipped_stack import ShippedStack

from stack.base.releases import load
from stack.builds import wheel
from stack.builds.build import private_places
from stack.core.cache import Cache
from stack.core.errors import CheckFailed
from stack.core.project import Project
from stack.release.ship import ship

INFO = "vllm-1.0.dist-info"
FILES = {
    "vllm/b.py": b"B = 1\n" * 50,
    "vllm/a.py": b"A = 1\n" * 50,
    f"{INFO}/METADATA": b"Name: vllm\nRequires-Dist: torch\nRequires-Dist: numpy\n",
    f"{INFO}/RECORD": b"",
}


def written(path: Path, seed: int) -> Path:
    """An archive of FILES whose order, times and modes depend on `seed`."""
    dice = random.Random(seed)
    names = list(FILES)
    dice.shuffle(names)
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            time = (dice.randrange(1990, 2020), 1, 1, 0, 0, dice.randrange(50))
            info = zipfile.ZipInfo(name, time)
            mode = dice.choice([0o755, 0o775]) if name.endswith("b.py") else 0o600
            info.external_attr = (0o100000 | mode) << 16
            info.compress_type = dice.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
            archive.writestr(info, FILES[name])
    return path


def canonical(path: Path) -> Path:
    """The canonical form of the archive at `path`, in its place."""
    path.write_bytes(wheel.canonical(wheel.read(path)))
    return path


def test_order_times_and_modes_leave_no_trace(tmp_path: Path):
    archives = {
        canonical(written(tmp_path / f"{seed}.whl", seed)).read_bytes()
        for seed in range(6)
    }
    assert len(archives) == 1
    with zipfile.ZipFile(tmp_path / "0.whl") as archive:
        infos = archive.infolist()
        assert archive.testzip() is None
    assert [info.filename for info in infos] == [
        "vllm/a.py",
        "vllm/b.py",
        f"{INFO}/METADATA",
        f"{INFO}/RECORD",
    ]
    assert {info.date_time for info in infos} == {wheel.TIME}
    modes = [oct(info.external_attr >> 16) for info in infos]
    assert modes == ["0o100644", "0o100755", "0o100644", "0o100644"]


def test_the_record_is_written_anew_and_holds(tmp_path: Path):
    path = written(tmp_path / "a.whl", 1)
    assert set(wheel.record_problems(wheel.read(path))) == set(FILES) - {
        f"{INFO}/RECORD"
    }
    archive = wheel.read(canonical(path))
    assert (dict(archive.problems), wheel.record_problems(archive)) == ({}, {})
    assert archive.metadata["requires_dist"] == ["torch", "numpy"]


def test_a_flipped_byte_is_found_in_its_own_member(tmp_path: Path):
    path = canonical(written(tmp_path / "a.whl", 1))
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("vllm/b.py")
    data[info.header_offset + 30 + len(info.filename) + info.compress_size // 2] ^= 1
    path.write_bytes(data)
    archive = wheel.read(path)
    assert set(archive.problems) == {"vllm/b.py"}
    assert "damaged" in archive.problems["vllm/b.py"]
    assert "vllm/a.py" in archive.members


@pytest.mark.parametrize("left", [0, 10, 300])
def test_a_wheel_cut_short_is_damaged_as_a_whole(tmp_path: Path, left: int):
    path = canonical(written(tmp_path / "a.whl", 1))
    path.write_bytes(path.read_bytes()[:left])
    archive = wheel.read(path)
    assert (list(archive.problems), dict(archive.members)) == ([""], {})
    with pytest.raises(CheckFailed, match="cannot be read"):
        wheel.canonical(archive)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["../x"], "leaves"),
        (["/etc/x"], "absolute|leaves"),
        (["vllm/a.py", "vllm/a.py"], "twice"),
    ],
)
def test_hostile_members_are_refused(tmp_path: Path, names: list[str], problem: str):
    path = tmp_path / "a.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for number, name in enumerate(names):
            archive.writestr(name, str(number))
    problems = wheel.read(path).problems
    assert list(problems) == [names[-1]]
    assert re.search(problem, problems[names[-1]]), problems


def test_an_archive_that_unpacks_to_too_much_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(wheel, "MAX_SIZE", 400)
    archive = wheel.read(written(tmp_path / "a.whl", 1))
    assert any("unpacks to more than 400" in text for text in archive.problems.values())
    assert sum(len(member.data) for member in archive.members.values()) <= 400


def test_record_and_members_must_agree(tmp_path: Path):
    archive = wheel.read(canonical(written(tmp_path / "a.whl", 1)))
    members = dict(archive.members)
    members["vllm/a.py"] = wheel.Member(b"A = 2\n")
    members["vllm/new.py"] = wheel.Member(b"")
    del members["vllm/b.py"]
    assert wheel.record_problems(wheel.Wheel(members, {})) == {
        "vllm/a.py": "its content is not what RECORD says",
        "vllm/new.py": "RECORD does not list it",
        "vllm/b.py": "RECORD lists it and the archive lacks it",
    }


def test_a_record_may_name_files_with_blanks_and_commas(tmp_path: Path):
    archive = wheel.read(written(tmp_path / "a.whl", 1))
    members = {"vllm/a b, c.json": wheel.Member(b"{}"), **archive.members}
    written_anew = io.BytesIO(wheel.canonical(wheel.Wheel(members, {})))
    assert wheel.record_problems(wheel.read(written_anew)) == {}


def test_two_builds_in_two_places_are_one_wheel(shipped: ShippedStack, tmp_path: Path):
    """With an extension into which a compiler would write its source's path."""
    shipments = []
    for name in ("here", "quite/far/away"):
        stack = shipped.copy(tmp_path / name)
        stack.with_extension()
        shipments.append(stack.ship(stack.root / "dist"))
    first, second = shipments
    assert dict(first.files) == dict(second.files)
    path = first.directory / first.wheel
    assert path.name == "vllm-1.0+xpu.dsv4.1-cp311-abi3-linux_x86_64.whl"
    archive = wheel.read(path)
    assert wheel.record_problems(archive) == {}
    extension = archive.members["vllm/where.abi3.so"].data
    assert b"csrc/where.cpp" in extension
    assert str(tmp_path).encode() not in extension
    assert wheel.leaks(archive, [place for place, _ in private_places(tmp_path)]) == []


def test_a_leak_is_named():
    archive = wheel.Wheel({"vllm/a.so": wheel.Member(b"\0/somewhere/private\0")}, {})
    assert wheel.leaks(archive, ["/somewhere/private"]) == [
        "vllm/a.so names /somewhere/private"
    ]


def test_what_is_shipped_installs_and_is_complete(
    shipped: ShippedStack, tmp_path: Path
):
    path = next((shipped.root / "dist/v1.0").glob("*.whl"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "--isolated",
        "install",
        "--no-index",
        "--no-deps",
        "--target",
        str(tmp_path / "site"),
        str(path),
    ]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "VALUE = 2" in (tmp_path / "site/vllm/value.py").read_text()
    kernels = tmp_path / "site/vllm/model_executor/kernels/xpu_dsv4"
    assert {path.name for path in kernels.glob("*.py")} == {
        "__init__.py",
        "_launch.py",
        "_triton.py",
        "decode.py",
    }


def test_a_real_release_is_the_same_from_two_places(
    real_project: Project, real_cache: Cache, tmp_path: Path
):
    """v0.22.1 compiles an extension. One build is in the cache of all runs, where its
    tests use it; the other shares only the trees with it."""
    release = load(real_project)["v0.22.1"]
    first = ship(real_project, real_cache, release, tmp_path / "one")
    cache = Cache(tmp_path / "the/other/cache")
    cache.root.mkdir(parents=True)
    cache.objects.symlink_to(real_cache.objects)
    second = ship(real_project, cache, release, tmp_path / "the/other")
    assert dict(first.files) == dict(second.files)
    path = first.directory / first.wheel
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert sha256 == first.files[first.wheel]
    assert "vllm/spinloop.abi3.so" in wheel.read(path).members
