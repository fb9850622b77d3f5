# SPDX-License-Identifier: Apache-2.0
"""Verification finds every change, down to one flipped byte, and names the file."""

import io
import json
import shlex
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import invoke
from fake_stack import git
from shipped_stack import ShippedStack

from stack.builds import wheel
from stack.core.errors import UsageError
from stack.release import verify as judge
from stack.release.ship import (
    CONSTRAINTS,
    IMAGE,
    INSTALL,
    PINS,
    PROVENANCE,
    SBOM,
    WheelBuild,
)
from stack.release.verify import BUNDLE, WheelVerdict

VALUE = "vllm/value.py"
DECODE = "vllm/model_executor/kernels/xpu_dsv4/decode.py"


@pytest.fixture(scope="module")
def wheel_build(shipped: ShippedStack) -> WheelBuild:
    """A new build of v1.0, made once: in most tests only the verified wheel changes."""
    return judge.build_release_wheel(
        judge.Runner(), shipped.project, shipped.cache, shipped.release
    )


@pytest.fixture
def folder(shipped: ShippedStack, tmp_path: Path) -> Path:
    """A copy of what was handed out, to be tampered with."""
    return Path(shutil.copytree(shipped.root / "dist/v1.0", tmp_path / "given"))


@pytest.fixture
def path(folder: Path) -> Path:
    return next(folder.glob("*.whl"))


@pytest.fixture
def judged(
    shipped: ShippedStack,
    path: Path,
    wheel_build: WheelBuild,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[], WheelVerdict]:
    """Judge the wheel without building it again."""
    monkeypatch.setattr(judge, "build_release_wheel", lambda *_, **__: wheel_build)
    return lambda: judge.verify(shipped.project, shipped.cache, path)


def problems_by_file(verdict: WheelVerdict) -> dict[str, str]:
    problems: dict[str, list[str]] = {}
    for each in verdict.differences:
        problems.setdefault(each.file, []).extend([each.problem, *each.detail])
    return {file: "\n".join(lines) for file, lines in problems.items()}


def flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def rewritten(path: Path, change: Callable[[dict[str, bytes]], None]) -> None:
    """The wheel with other members, its RECORD and archive in perfect order."""
    members = {name: member.data for name, member in wheel.read(path).members.items()}
    change(members)
    changed = wheel.Wheel(
        {name: wheel.Member(data) for name, data in members.items()}, {}
    )
    path.write_bytes(wheel.canonical(changed))


def test_what_was_built_here_is_verified_by_building_it_again(
    shipped: ShippedStack, path: Path
):
    verdict = judge.verify(shipped.project, shipped.cache, path)
    assert problems_by_file(verdict) == {}
    assert verdict.good
    assert verdict.notes == (
        f"no workflow attests this wheel: no {BUNDLE} beside it",
        "--offline: the hashes in pins.txt are taken as they are",
    )


def test_one_flipped_byte_in_each_part_of_the_archive(judged, path: Path):
    with zipfile.ZipFile(path) as archive:
        infos = {info.filename: info for info in archive.infolist()}
    for name, info in infos.items():
        before = path.read_bytes()
        start = info.header_offset + 30 + len(name)
        flip(path, start + info.compress_size // 2)
        problems = problems_by_file(judged())
        assert name in problems and path.name in problems, name
        assert "damaged" in problems[name]
        path.write_bytes(before)


def test_a_flipped_byte_between_members_is_found_too(judged, path: Path):
    with zipfile.ZipFile(path) as archive:
        header = archive.infolist()[0].header_offset
    flip(path, header + 10)
    problems = problems_by_file(judged())
    assert "the archive's bytes differ" in problems[path.name] or VALUE in problems


def test_a_member_changed_with_care_is_found(judged, path: Path):
    """RECORD and the checksums agree with it; only a new build can tell."""

    def change(members: dict[str, bytes]) -> None:
        members[VALUE] = members[VALUE].replace(b"VALUE = 2", b"VALUE = 3")

    rewritten(path, change)
    problems = problems_by_file(judged())
    assert "differs from the one built here" in problems[VALUE]
    assert "as made here: VALUE = 2" in problems[VALUE]
    assert any(name.endswith("/RECORD") for name in problems)


def test_a_member_more_and_a_member_less(judged, path: Path):
    def change(members: dict[str, bytes]) -> None:
        members["vllm/extra.py"] = members.pop(VALUE)

    rewritten(path, change)
    problems = problems_by_file(judged())
    assert "only the wheel has it" in problems["vllm/extra.py"]
    assert "the wheel lacks it" in problems[VALUE]


def test_an_executable_bit_is_found(judged, path: Path):
    read = wheel.read(path)
    members = dict(read.members)
    members[VALUE] = wheel.Member(members[VALUE].data, executable=True)
    path.write_bytes(wheel.canonical(wheel.Wheel(members, {})))
    assert VALUE in problems_by_file(judged())


def test_a_truncated_wheel(judged, path: Path):
    path.write_bytes(path.read_bytes()[:-200])
    problems = problems_by_file(judged())
    assert list(problems) == [path.name]
    assert "damaged or cut short" in problems[path.name]


@pytest.mark.parametrize("name", [CONSTRAINTS, PINS, IMAGE, INSTALL, SBOM])
def test_a_changed_file_beside_the_wheel(judged, folder: Path, name: str):
    text = (folder / name).read_text()
    (folder / name).write_text(text.replace("2.11.0", "2.11.1").replace("=", "= ", 1))
    assert name in problems_by_file(judged())


@pytest.mark.parametrize("name", [CONSTRAINTS, PINS, IMAGE, INSTALL, SBOM, PROVENANCE])
def test_a_missing_file_beside_the_wheel(judged, folder: Path, name: str):
    (folder / name).unlink()
    assert "missing beside the wheel" in problems_by_file(judged())[name]


def test_a_provenance_that_lies(judged, folder: Path):
    statement = json.loads((folder / PROVENANCE).read_bytes())
    parts = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    patch = next(
        part for part in parts if part["name"].startswith("patches/raise-value/")
    )
    patch["digest"]["sha256"] = "0" * 64
    (folder / PROVENANCE).write_text(json.dumps(statement))
    problems = problems_by_file(judged())
    assert PROVENANCE in problems
    assert "not the one that the wheel was built from" in problems[patch["name"]]


def test_a_provenance_never_leads_out_of_the_checkout(
    judged, folder: Path, tmp_path: Path
):
    statement = json.loads((folder / PROVENANCE).read_bytes())
    parts = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    part = next(
        part for part in parts if part["name"].startswith("patches/raise-value/")
    )
    part["name"] = str(tmp_path / "secret")
    (tmp_path / "secret").write_text("")
    (folder / PROVENANCE).write_text(json.dumps(statement))
    assert "this checkout does not" in problems_by_file(judged())[part["name"]]


def test_another_machine_is_a_note_and_no_difference(judged, folder: Path):
    statement = json.loads((folder / PROVENANCE).read_bytes())
    internal = statement["predicate"]["buildDefinition"]["internalParameters"]
    internal["machine"]["compiler"] = "c++ 99"
    (folder / PROVENANCE).write_text(json.dumps(statement, indent=1) + "\n")
    verdict = judged()
    assert problems_by_file(verdict) == {}
    assert any("compiler was c++ 99" in note for note in verdict.notes)


@pytest.mark.parametrize(
    ("name", "member"),
    [
        ("kernels/xpu_dsv4/decode.py", DECODE),
        ("vllm_overlay/common/vllm/xpu/layer.py", "vllm/xpu/layer.py"),
    ],
)
def test_a_tampered_kernel_or_overlay_file(
    shipped: ShippedStack, tmp_path: Path, name: str, member: str
):
    """The wheel is as it was; this repository's file is not."""
    stack = shipped.copy(tmp_path / "stack")
    [wheel_file] = (stack.root / "dist/v1.0").glob("*.whl")
    flip(stack.project.root / name, -2)
    stack.rederive()
    problems = problems_by_file(judge.verify(stack.project, stack.cache, wheel_file))
    assert "not the one that the wheel was built from" in problems[name]
    assert "differs from the one built here" in problems[member]
    assert VALUE not in problems


def test_a_tampered_patch(shipped: ShippedStack, tmp_path: Path):
    """In its text, where it still applies, and in its context, where it cannot."""
    stack = shipped.copy(tmp_path / "stack")
    [wheel_file] = (stack.root / "dist/v1.0").glob("*.whl")
    patch = stack.patch("raise-value")
    before = patch.read_bytes()
    patch.write_bytes(before.replace(b"Why.", b"Wly."))
    problems = problems_by_file(judge.verify(stack.project, stack.cache, wheel_file))
    name = "patches/raise-value/v1.0.patch"
    assert "not the one that the wheel was built from" in problems[name]
    assert "series" not in problems
    patch.write_bytes(before.replace(b"OLD = 1", b"OLD = 7"))
    problems = problems_by_file(judge.verify(stack.project, stack.cache, wheel_file))
    assert name in problems
    assert "cannot be built again" in problems["series"]
    assert "raise-value" in problems["series"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("numpy-1.0-py3-none-any.whl", "not a wheel of a whole series"),
        ("vllm-1.0-py3-none-any.whl", "not a wheel of a whole series"),
        ("vllm-1.0+xpu.dsv4.1.step1-py3-none-any.whl", "not a wheel of a whole"),
        (
            "vllm-7.0+xpu.dsv4.3-py3-none-any.whl",
            "is of v7.0, revision 3, which is not",
        ),
        ("vllm-1.0+xpu.dsv4.9-py3-none-any.whl", "is of revision 9"),
        ("vllm.zip", "not a wheel of a whole series"),
    ],
)
def test_a_wheel_that_is_not_ours(
    shipped: ShippedStack, tmp_path: Path, name: str, problem: str
):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UsageError, match=problem):
        judge.verify(shipped.project, shipped.cache, tmp_path / name)


def test_the_way_to_the_checkout_of_another_release(
    shipped: ShippedStack, tmp_path: Path
):
    """It is the one that pinned the release: the next command finds it."""
    stack = shipped.copy(tmp_path)
    root = stack.project.root
    git(root, "init", "-q")
    text = stack.project.releases_file.read_text()
    other = text.replace('version = "1.0"', 'version = "0.9"')
    for subject, written in (("Pin v0.9", other), ("Retire v0.9", text)):
        stack.project.releases_file.write_text(written)
        git(root, "add", ".")
        git(root, "commit", "-qm", subject)
    path = tmp_path / "vllm-0.9+xpu.dsv4.1-py3-none-any.whl"
    path.write_bytes(b"")
    with pytest.raises(UsageError) as caught:
        judge.verify(stack.project, stack.cache, path)
    assert caught.value.hint is not None
    line = caught.value.hint.partition(" names the commits")[0]
    words = shlex.split(line)
    assert words[0] == "git"
    log = git(root, *words[1:])
    assert [entry.split(" ", 1)[1] for entry in log.splitlines()] == [
        "Retire v0.9",
        "Pin v0.9",
    ]


def test_a_wheel_of_a_retired_release(shipped: ShippedStack, tmp_path: Path):
    stack = shipped.copy(tmp_path)
    with open(stack.project.releases_file, "a") as file:
        file.write(f'\n[[retired]]\nversion = "0.9"\ncommit = "{"ab" * 20}"\n')
    path = tmp_path / "vllm-0.9+xpu.dsv4.4-py3-none-any.whl"
    path.write_bytes(b"")
    with pytest.raises(
        UsageError, match=r"of v0\.9, revision 4, which is ret"
    ) as caught:
        judge.verify(stack.project, stack.cache, path)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("git worktree add DIR abababababab, the last")


def test_a_wheel_under_another_ones_name(judged, path: Path):
    def change(members: dict[str, bytes]) -> None:
        (name,) = (name for name in members if name.endswith("/METADATA"))
        members[name] = members[name].replace(b"Version: 1.0+", b"Version: 2.0+")

    rewritten(path, change)
    version = path.name.split("-")[1].replace("1.0+", "2.0+")
    found = problems_by_file(judged())[path.name]
    assert f"by its METADATA it is the wheel of vllm {version}" in found


def test_a_file_of_our_name_that_is_no_archive(judged, path: Path):
    path.write_bytes(b"hello")
    assert "damaged or cut short" in problems_by_file(judged())[path.name]


def test_the_command_line_tells_the_outcome(
    shipped: ShippedStack,
    folder: Path,
    path: Path,
    judged,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(shipped.project.root)
    monkeypatch.setenv("XPUSTACK_CACHE", str(shipped.cache.root))
    words = ["verify", str(path), "--offline"]
    done = invoke(*words)
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (
        0,
        f"{path.name}: verified",
    )
    (folder / CONSTRAINTS).write_text("torch\n")
    done = invoke(*words)
    assert (done.exit_code, "1 files differ" in done.stdout) == (1, True), done.output
    data = json.loads(invoke(*words, "--json").stdout)["data"]
    assert (data["verified"], data["release"]) == (False, "v1.0")
    assert [difference["file"] for difference in data["differences"]] == [CONSTRAINTS]
    done = invoke("verify", str(folder / "none.whl"))
    assert (done.exit_code, "no such wheel" in done.output) == (2, True)


def test_members_are_read_from_memory_as_from_disk(path: Path):
    again = wheel.read(io.BytesIO(path.read_bytes()))
    assert again == wheel.read(path)
