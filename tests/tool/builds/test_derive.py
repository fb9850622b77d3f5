# SPDX-License-Identifier: Apache-2.0
"""Derived trees equal real builds; where that is uncertain, trees are really built."""

import os
import shutil
from pathlib import Path

import pytest
from tiny_stack import BASE, HEADER, TWO, VALUE, TinyStack

from xpustack.base.store import Store
from xpustack.builds import build as build_module
from xpustack.builds import derive as derive_module
from xpustack.builds.build import Build, build, build_version, manifest_of
from xpustack.builds.derive import takes_part
from xpustack.builds.equality import next_to_prove, prove_equal
from xpustack.core.cache import Cache
from xpustack.core.errors import CheckFailed
from xpustack.core.process import Runner
from xpustack.series.tree import Tree

EXTRA = "vllm/extra.py"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> TinyStack:
    """Steps that change, add and remove modules, and one that changes setup.py."""
    stack = TinyStack(tmp_path_factory.mktemp("derived"))
    stack.add("raise-value", {VALUE: TWO})
    stack.add("add-extra", {EXTRA: HEADER})
    stack.add("remove-extra", {EXTRA: None})
    script = BASE["setup.py"].replace("packages = ", "packages = ['vllm'] or ")
    stack.add("change-setup", {"setup.py": script})
    stack.add("after-setup", {VALUE: TWO + "\n\nTHREE = 3\n"})
    stack.add("last", {VALUE: BASE[VALUE]})
    stack.builds(Runner())
    return stack


@pytest.fixture
def stack(tmp_path: Path, written: TinyStack) -> TinyStack:
    return written.copy(tmp_path)


def builds(stack: TinyStack) -> dict[str, tuple[Tree, Build]]:
    """Each tree of v1.0 and its build, by slug, as a new run returns them."""
    trees = stack.trees()
    tree_builds = stack.builds(Runner())
    slugs = [tree.label for tree in trees]
    return dict(zip(slugs, zip(trees, tree_builds, strict=True), strict=True))


def is_derived(stack: TinyStack, tree_build: Build) -> bool:
    """Whether a build was derived from another tree's."""
    manifest = manifest_of(stack.cache, tree_build.key)
    return manifest is not None and manifest.origin is not None


def test_only_modules_are_derived(stack: TinyStack):
    pairs = builds(stack)
    assert {
        slug: is_derived(stack, tree_build) for slug, (_, tree_build) in pairs.items()
    } == {
        "base": False,
        "raise-value": True,
        "add-extra": True,
        "remove-extra": True,
        "change-setup": False,
        "after-setup": True,
        "last": False,
    }
    assert all(tree_build.cached for _, tree_build in pairs.values())


def test_every_derived_tree_is_what_a_real_build_installs(stack: TinyStack):
    store = Store(stack.cache)
    for tree, tree_build in builds(stack).values():
        if is_derived(stack, tree_build):
            proof = prove_equal(Runner(), stack.cache, store, tree, tree_build)
            assert proof.members > 5


def test_unchanged_files_are_links(written: TinyStack):
    pairs = builds(written)
    inodes = {
        (tree_build.installed / "vllm/platforms.py").stat().st_ino
        for _, tree_build in pairs.values()
    }
    assert len(inodes) == 1
    assert (pairs["add-extra"][1].installed / EXTRA).is_file()
    assert not (pairs["remove-extra"][1].installed / EXTRA).exists()


def test_two_contents_of_one_size_differ_in_time(stack: TinyStack):
    """Otherwise Python would use the byte code of one for the other."""
    pairs = builds(stack)
    base, step = (
        (pairs[slug][1].installed / VALUE).stat() for slug in ("base", "raise-value")
    )
    assert base.st_size == step.st_size and int(base.st_mtime) != int(step.st_mtime)


def damaged_after(stack: TinyStack, slug: str) -> CheckFailed:
    """The error about a tree that a faulty derivation made."""
    shutil.rmtree(stack.cache.builds)
    tree, tree_build = builds(stack)[slug]
    assert is_derived(stack, tree_build)
    with pytest.raises(CheckFailed, match="differs from what a real build") as caught:
        prove_equal(Runner(), stack.cache, Store(stack.cache), tree, tree_build)
    assert caught.value.step == slug
    return caught.value


def test_a_deleted_file_that_stays_is_found(
    stack: TinyStack, monkeypatch: pytest.MonkeyPatch
):
    real = derive_module._changes

    def forgetful(*trees):
        return [change for change in real(*trees) if change.new is not None]

    # Derived from a tree that has the file.
    monkeypatch.setattr(derive_module, "_changes", forgetful)
    monkeypatch.setattr(build_module, "origin_of", _parent)
    monkeypatch.setattr(derive_module, "origin_of", _parent)
    error = damaged_after(stack, "remove-extra")
    assert f"{EXTRA}: a real build does not install it" in error.detail


def test_a_step_of_setup_py_that_is_derived_is_found(
    stack: TinyStack, monkeypatch: pytest.MonkeyPatch
):
    def forgetful(*trees):
        return [change for change in real(*trees) if change.path != "setup.py"]

    real = derive_module._changes
    script = BASE["setup.py"].replace("setup(", "setup(description='new', ")
    stack.add("describe", {"setup.py": script})
    stack.add("behind", {VALUE: TWO})
    monkeypatch.setattr(derive_module, "takes_part", lambda path, scripts: False)
    monkeypatch.setattr(derive_module, "_changes", forgetful)
    error = damaged_after(stack, "describe")
    assert any("METADATA: its content differs" in line for line in error.detail)


def test_what_was_never_proven_or_longest_ago_is_next(stack: TinyStack):
    store = Store(stack.cache)
    pairs = [pair for pair in builds(stack).values() if is_derived(stack, pair[1])]
    proven = []
    for _ in range(5):
        tree, tree_build = next_to_prove(stack.cache, pairs)
        prove_equal(Runner(), stack.cache, store, tree, tree_build)
        proven.append(tree.step.slug)
    order = ["raise-value", "add-extra", "remove-extra", "after-setup"]
    assert proven == [*order, "raise-value"]
    assert next_to_prove(stack.cache, pairs[:2])[0].step.slug == "add-extra"


SETUP = """
envs = load("envs", os.path.join(ROOT, "vllm", "envs.py"))
root = ROOT / "vllm" / "plugins" / "early.py"
names = ["vllm/listed.py"]
"""


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("vllm/envs.py", True),
        ("vllm/plugins/early.py", True),
        ("vllm/listed.py", True),
        ("vllm/plugins/envs.py", False),
        ("vllm/early.py", False),
        ("setup.py", True),
        ("vllm/data.json", True),
        ("csrc/any.cpp", True),
        ("tests/vllm/a.py", True),
    ],
)
def test_what_takes_part_in_a_build(path: str, part: bool):
    assert takes_part(path, SETUP) is part


def flip(path: Path) -> None:
    """Change one byte of a file that cannot be written to, at the same time."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    path.chmod(status.st_mode)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def again(stack: TinyStack, slug: str) -> tuple[Build, list[str]]:
    """The build of a tree as a new run returns it, and the run's messages."""
    cache = Cache(stack.cache.root)
    trees = stack.trees()
    tree = next(tree for tree in trees if tree.slug == slug)
    messages: list[str] = []
    version = build_version(tree, len(trees) - 1)
    report = messages.append
    result = build(Runner(), cache, Store(cache), tree, version, progress=report)
    return result, messages


def plant(site: Path, kind: str) -> str:
    if kind == "flipped":
        flip(site / "vllm/platforms.py")
        return "vllm/platforms.py is changed"
    if kind == "extra":
        (site / "vllm/planted.py").write_text("")
        return "vllm/planted.py does not belong to it"
    if kind == "folder":
        (site / "vllm/planted").mkdir()
        return "vllm/planted does not belong to it"
    if kind == "executable":
        path = site / "vllm/platforms.py"
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data)
        path.chmod(0o755)
        return "vllm/platforms.py is changed"
    if kind == "link":
        (site / "vllm/platforms.py").rename(site / "elsewhere.py")
        (site / "vllm/platforms.py").symlink_to(site / "elsewhere.py")
        return "elsewhere.py does not belong to it"
    (site / "vllm/platforms.py").unlink()
    return "vllm/platforms.py is missing"


@pytest.mark.parametrize(
    "kind", ["flipped", "extra", "folder", "executable", "link", "missing"]
)
@pytest.mark.parametrize("slug", ["add-extra", "change-setup"])
def test_an_installed_tree_is_verified_and_repaired(
    stack: TinyStack, slug: str, kind: str
):
    first, _ = again(stack, slug)
    assert first.cached
    problem = plant(first.installed, kind)
    repaired, messages = again(stack, slug)
    assert not repaired.cached and repaired.digest == first.digest
    assert f"building v1.0 {slug} again: {problem}" in messages
    checked, messages = again(stack, slug)
    assert checked.cached and messages == []


def test_a_damaged_manifest_is_made_anew(stack: TinyStack):
    first, _ = again(stack, "add-extra")
    flip(first.installed.parent / "manifest.json")
    assert manifest_of(stack.cache, first.key) is None
    assert not again(stack, "add-extra")[0].cached
    assert again(stack, "add-extra")[0].cached


def test_where_links_fail_files_are_copied(
    stack: TinyStack, monkeypatch: pytest.MonkeyPatch
):
    shutil.rmtree(stack.cache.builds)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(31, "Too many links")

    monkeypatch.setattr("xpustack.core.contents.os.link", refuse)
    copied, _ = again(stack, "add-extra")
    assert (copied.installed / EXTRA).stat().st_nlink == 1
    assert again(stack, "add-extra")[0].cached


def _parent(git: object, tree: Tree, version: str) -> Tree | None:
    return tree.parent if "step" in version and tree.index else None
