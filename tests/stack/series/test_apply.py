# SPDX-License-Identifier: Apache-2.0
"""Trees: exact, the same on every machine, and safe from kills and parallel runs."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from calls import calling
from fake_stack import ATTENTION, BASE, FakeStack, edited

from stack.base import releases
from stack.base.archive import members
from stack.base.download import base_of, fetch
from stack.base.releases import Release
from stack.base.store import Store
from stack.core.cache import Cache
from stack.core.errors import ApplyError, EnvironmentProblem, SeriesError, StackError
from stack.core.project import Project
from stack.series.apply import trees, trees_before_failure
from stack.series.patch import format_patch, load_series
from stack.series.recorded import trees_file
from stack.series.tree import Series, Trailers


@pytest.fixture
def stack(tmp_path: Path, three_steps: FakeStack) -> FakeStack:
    return three_steps.copy(tmp_path)


def order(stack: FakeStack, *slugs: str) -> None:
    lines = (f"{slug}/v1.0.patch\n" for slug in slugs)
    stack.write("patches/v1.0/series", "".join(lines))


def failure(stack: FakeStack) -> StackError:
    with pytest.raises(SeriesError) as caught:
        stack.trees()
    assert caught.value.release == "v1.0" and caught.value.hint
    return caught.value


def contents(store: Store, tree: str) -> dict[str, tuple[int, bytes]]:
    """Every file of a tree: mode and bytes by path."""
    files = store.git.files(tree)
    blobs = store.git.blobs(entry.blob for entry in files.values())
    return {
        path: (int(entry.mode, 8), blobs[entry.blob]) for path, entry in files.items()
    }


def ends() -> list[Release]:
    """The oldest and the newest pin. For all, the recorded tree of each step is the
    hash of every file of its base, too."""
    pins = list(releases.load(Project.find(Path(__file__).parent)))
    return [pins[0], pins[-1]]


@pytest.mark.parametrize("release", ends(), ids=lambda release: release.name)
def test_a_base_is_its_archive_byte_for_byte(
    release: Release, real_cache: Cache
) -> None:
    store = Store(real_cache)
    base = base_of(store, release)
    archive = fetch(release, real_cache)
    # Git's name of a file is the hash of its bytes.
    expected = {
        path: (mode, hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest())
        for path, mode, data in members(archive)
    }
    assert len(expected) > 4000 and "vllm/_version.py" in expected
    files = store.git.files(base.tree)
    found = {path: (int(file.mode, 8), file.blob) for path, file in files.items()}
    assert found == expected


def test_ignores_attributes_links_and_modes_change_nothing(stack: FakeStack) -> None:
    base = stack.trees()[0]
    files = contents(Store(stack.cache), base.tree_id)
    plain = {path: (0o100644, text.encode()) for path, text in BASE.items()}
    assert files == {
        **plain,
        "VERSION": (0o100644, b"1.0"),
        "run.sh": (0o100755, b""),
        "README": (0o120000, b"run.sh"),
    }


def test_steps_give_the_expected_files(stack: FakeStack) -> None:
    base, first, second, third = stack.trees()
    store = Store(stack.cache)
    before, after = contents(store, base.tree_id), contents(store, third.tree_id)
    both = edited(edited(ATTENTION, 5), 7)
    assert after["vllm/attention.py"][1].decode() == both
    home = "vllm/model_executor/kernels/xpu_dsv4"
    kernels = {f"{home}/{name}.py" for name in ("__init__", "_launch", "_triton")}
    new = {"vllm/xpu/layer.py", f"{home}/decode.py", *kernels}
    assert after.keys() - before.keys() == new
    assert third.added == tuple(sorted(new))
    assert third.changed == tuple(sorted({"vllm/rope.py", *new}))
    assert b"from vllm.triton_utils import" in after[f"{home}/_triton.py"][1]
    assert [first.index, second.index, third.index] == [1, 2, 3]
    assert third.parent is second and first.parent == base


def test_a_tree_knows_what_it_is_made_of(stack: FakeStack) -> None:
    series = stack.series()
    first, second, third = series.steps
    assert [tree.label for tree in series.trees] == ["base", "first", "second", "third"]
    assert (series.base.slug, first.slug) == (None, "first")
    assert third.applied == (third, second, first) and series.base.applied == ()
    assert third.base is series.base and third.release == stack.release
    assert (series.tip, Series(series.base).tip) == (third, series.base)


def test_ids_depend_on_content_alone(
    stack: FakeStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [tree.commit for tree in stack.trees()]
    config = tmp_path / "config"
    config.write_text(
        "[user]\n name = Somebody\n[core]\n autocrlf = true\n"
        "[diff]\n noprefix = true\n algorithm = patience\n[commit]\n gpgsign = true\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_AUTHOR_DATE", "2001-01-01T00:00:00Z")
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "foreign"))
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    fresh = stack.copy(tmp_path / "elsewhere")
    subprocess.run(["rm", "-r", fresh.cache.objects], check=True)
    assert [tree.commit for tree in fresh.trees()] == expected


def test_a_series_has_the_same_ids_from_a_fresh_cache(
    tmp_path: Path, real_cache: Cache, real_project: Project
) -> None:
    fresh, release = Cache(tmp_path / "fresh"), ends()[-1]
    archive = fetch(release, real_cache)
    place = fresh.sdists / release.sha256 / release.sdist
    place.parent.mkdir(parents=True)
    place.symlink_to(archive)
    one, other = (
        trees(Store(cache), real_project, release).tip.commit
        for cache in (real_cache, fresh)
    )
    assert one == other


def test_real_series_from_a_warm_cache_are_quick(
    real_cache: Cache, real_project: Project
) -> None:
    pins = releases.load(real_project)
    for release in pins:
        trees(Store(real_cache), real_project, release)
    before = os.times()
    for release in pins:
        trees(Store(real_cache), real_project, release)
    # Processor time, its git's included: wall time depends on what else runs here.
    assert sum(os.times()[:4]) - sum(before[:4]) < 10


def test_the_wrong_order_is_an_error_with_both_sides(stack: FakeStack) -> None:
    order(stack, "second", "first", "third")
    error = failure(stack)
    assert isinstance(error, ApplyError)
    assert (error.step, error.path) == ("second", "vllm/attention.py")
    assert "hunk 1 of 1 (@@ -4,7 +4,7 @@" in error.message
    assert "-attention line 5 changed" in error.detail
    assert "+attention line 5" in error.detail


def with_diff(stack: FakeStack, slug: str, old: str, new: str) -> None:
    path = stack.patch(slug)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_an_offset_gives_the_recorded_tree(stack: FakeStack) -> None:
    before = [tree.tree_id for tree in stack.trees()]
    with_diff(stack, "first", "@@ -2,7 +2,7 @@", "@@ -3,7 +3,7 @@")
    assert [tree.tree_id for tree in stack.trees()] == before


def test_an_offset_to_another_place_is_an_error(stack: FakeStack) -> None:
    """The file has the lines twice; the nearer place is not the one that was saved."""
    base = "".join(f"line {number % 10}\n" for number in range(60))
    stack.publish("3.0", {"vllm/attention.py": base})
    stack.step("twice", {"vllm/attention.py": edited(base, 15)}, "", "v3.0")
    assert stack.trees("v3.0")
    path = stack.patch("twice", "v3.0")
    path.write_text(path.read_text().replace("@@ -12,7 +12,7 @@", "@@ -32,7 +32,7 @@"))
    with pytest.raises(ApplyError, match="does not give the tree that is recorded"):
        stack.trees("v3.0")


def test_fuzz_is_an_error_that_shows_both_sides(stack: FakeStack) -> None:
    with_diff(stack, "first", " attention line 2\n", " attention line two\n")
    error = failure(stack)
    assert "hunk 1 of 1" in error.message and "does not fit" in error.message
    assert "-attention line two" in error.detail
    assert "+attention line 2" in error.detail


def test_a_patch_edited_by_hand_names_its_releases_and_the_way_on(
    stack: FakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = calling(stack, monkeypatch)
    stack.three_steps("v2.0")
    assert stack.patch("first", "v2.0") == stack.patch("first")
    with_diff(stack, "first", "+attention line 5 changed", "+attention line 5 edited")
    with_diff(stack, "second", " attention line 5 changed", " attention line 5 edited")
    error = failure(stack)
    assert (error.step, error.path) == ("first", str(stack.patch("first")))
    assert "the patch is that of v1.0, v2.0" in error.detail
    assert error.hint is not None
    command = error.hint.partition("if it is meant: ")[2]
    assert command == "xpustack rederive v1.0 v2.0"
    done = call(*command.split()[1:], "--offline")
    assert done.exit_code == 0, done.output
    assert "v2.0: trees recorded from first on: 3" in done.output
    for release in ("v1.0", "v2.0"):
        content = contents(Store(stack.cache), stack.trees(release)[-1].tree_id)
        assert b"line 5 edited\n" in content["vllm/attention.py"][1]


@pytest.mark.parametrize("line", ["second 0123", "", "first " + "0" * 40])
def test_a_malformed_record_of_trees_is_an_error(stack: FakeStack, line: str) -> None:
    path = trees_file(stack.project, "v1.0")
    path.write_text(path.read_text() + line + "\n")
    assert "is not one step and the id of its tree" in failure(stack).message


def test_a_wrong_recorded_tree_is_an_error(stack: FakeStack) -> None:
    path = trees_file(stack.project, "v1.0")
    right = stack.trees()[2].tree_id
    path.write_text(path.read_text().replace(right, "1" * 40))
    error = failure(stack)
    assert isinstance(error, ApplyError) and error.step == "second"
    assert f"recorded in {path}: {'1' * 40}" in error.detail
    assert f"now: {right}" in error.detail


def test_a_tree_that_is_not_recorded_is_an_error(stack: FakeStack) -> None:
    trees_file(stack.project, "v1.0").unlink()
    assert "no tree is recorded for the step" in failure(stack).message


def test_swapped_lines_of_steps_that_do_not_conflict_are_an_error(
    stack: FakeStack,
) -> None:
    order(stack, "first", "third", "second")
    error = failure(stack)
    assert error.step == "third" and "the order of the steps changed" in error.message


def test_an_edited_kernel_is_an_error_until_it_is_recorded(stack: FakeStack) -> None:
    stack.write("kernels/xpu_dsv4/_launch.py", "OPTIONS = 2\n")
    assert failure(stack).step == "third"
    stack.rederive()
    assert stack.trees()[-1].index == 3


def test_an_order_of_the_layout_before_is_an_error(stack: FakeStack) -> None:
    """A move of the patches into the folders of their steps that stopped half-way."""
    stack.write("patches/v1.0/series", "first.patch\nsecond/v1.0.patch\n")
    assert "'first.patch' is not a patch name such as" in failure(stack).message


def test_an_overlay_path_that_the_base_has_is_an_error(stack: FakeStack) -> None:
    with_diff(stack, "third", "Overlay: vllm/xpu/layer.py", "Overlay: vllm/windows.py")
    stack.write("vllm_overlay/common/vllm/windows.py", "x\n")
    error = failure(stack)
    assert error.step == "third" and "already has vllm/windows.py" in error.message
    assert str(error.path).endswith("vllm_overlay/common/vllm/windows.py")


@pytest.mark.parametrize("path", ["../x.py", "/etc/x.py", ".git/config", "PKG-INFO"])
def test_a_path_that_no_step_may_touch(stack: FakeStack, path: str) -> None:
    text = stack.patch("first").read_text()
    stack.patch("first").write_text(text.replace("vllm/attention.py", path))
    assert path in str(failure(stack))


def test_a_step_without_a_diff_brings_its_kernels(stack: FakeStack) -> None:
    step = load_series(stack.project, "v1.0")[2]
    trailers = Trailers(
        upstream_status="Pending",
        removal="x",
        kernels=("kv/gather",),
        test="tests/steps/test_any.py",
        fails_before="none [unused yet]",
    )
    path = stack.patch("fourth")
    empty = type(step)("v1.0", "fourth", path, "Bring gather", "", trailers, b"")
    path.parent.mkdir()
    path.write_bytes(format_patch(empty))
    order(stack, "first", "second", "third", "fourth")
    stack.rederive()
    assert stack.trees()[-1].added == (
        "vllm/model_executor/kernels/xpu_dsv4/kv/__init__.py",
        "vllm/model_executor/kernels/xpu_dsv4/kv/gather.py",
    )


def test_a_broken_release_leaves_the_others_alone(stack: FakeStack) -> None:
    stack.step("first", {"vllm/attention.py": edited(ATTENTION, 2)}, "", "v2.0")
    order(stack, "first", "third", "second")
    with_diff(stack, "third", " rope line 1\n", " rope line one\n")
    results = {
        release.name: trees_before_failure(Store(stack.cache), stack.project, release)
        for release in stack.releases
    }
    series = results["v1.0"]
    assert [tree.slug for tree in series.steps] == ["first"]
    assert series.problem is not None and series.problem.step == "third"
    series = results["v2.0"]
    assert [tree.index for tree in series.trees] == [0, 1]
    assert series.problem is None


RUN = """
import sys
from pathlib import Path
from stack.base import releases
from stack.core.cache import Cache
from stack.core.project import Project
from stack.base.store import Store, Writer
from stack.series.apply import trees
project, cache, stop = Project(Path(sys.argv[1])), Cache(Path(sys.argv[2])), sys.argv[3]
if stop:
    import time
    def wait(self, *arguments):
        (self.directory / "private-index.lock").touch()
        print("reached", flush=True)
        time.sleep(60)
    setattr(Writer, stop, wait)
release = next(iter(releases.load(project)))
series = trees(Store(cache), project, release)
print(*(tree.commit for tree in series.trees))
"""


def start(stack: FakeStack, stop: str = "") -> "subprocess.Popen[str]":
    root = Path(__file__).parents[3]
    return subprocess.Popen(
        [sys.executable, "-c", RUN, stack.project.root, stack.cache.root, stop],
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("stop", ["import_base", "read_tree", "commit", "set_ref"])
def test_a_killed_run_leaves_nothing_half_done(stack: FakeStack, stop: str) -> None:
    expected = [tree.commit for tree in stack.trees()]
    subprocess.run(["rm", "-r", stack.cache.objects], check=True)
    killed = start(stack, stop)
    assert killed.stdout is not None and killed.stdout.readline() == "reached\n"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not any(ref.startswith("refs/steps") for ref in Store(stack.cache).refs())
    assert [tree.commit for tree in stack.trees()] == expected
    assert not list(stack.cache.objects.glob("*.lock"))
    Store(stack.cache).git.run("fsck", "--strict", "--no-dangling")


def test_two_runs_at_once_agree(stack: FakeStack) -> None:
    expected = [tree.commit for tree in stack.trees()]
    subprocess.run(["rm", "-r", stack.cache.objects], check=True)
    runs = [start(stack) for _ in range(3)]
    for run in runs:
        output, _ = run.communicate(timeout=60)
        assert run.returncode == 0 and output.split() == expected


@pytest.mark.parametrize("spare", [0, 16, 48, 80], ids="{}KiB".format)
def test_a_full_disk_stops_the_store_and_nothing_else(
    stack: FakeStack, small_disk: Path, spare: int
) -> None:
    expected = [tree.commit for tree in stack.trees()]
    subprocess.run(["rm", "-r", stack.cache.objects], check=True)
    subprocess.run(["cp", "-r", stack.cache.root, small_disk / "cache"], check=True)
    stack.cache = Cache(small_disk / "cache")
    filler = small_disk / "filler"
    free = shutil.disk_usage(small_disk).free
    filler.write_bytes(bytes(free - (spare << 10)))
    with pytest.raises(EnvironmentProblem, match="the disk is full"):
        stack.trees()
    filler.unlink()
    assert [tree.commit for tree in stack.trees()] == expected
    Store(stack.cache).git.run("fsck", "--strict", "--no-dangling")


def test_a_missing_git_is_named(
    stack: FakeStack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentProblem, match="git is not installed"):
        stack.trees()
