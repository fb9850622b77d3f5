# SPDX-License-Identifier: Apache-2.0
"""Copied trees equal real builds; where that is uncertain, trees are really built."""

import os
import shutil
from contextlib import closing
from importlib.util import source_hash
from pathlib import Path

import pytest
from tiny_stack import BASE, HEADER, TWO, VALUE, TinyStack

from stack.base.store import Store
from stack.builds import copy as copy_module
from stack.builds.build import backend_server, build, build_version, compare
from stack.builds.copy import origin_of, takes_part
from stack.builds.installed import Build, byte_code_path, manifest_of
from stack.core.cache import Cache
from stack.core.errors import CheckFailed
from stack.core.process import Runner
from stack.forks.server import Server
from stack.series.tree import Tree

EXTRA = "vllm/extra.py"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> TinyStack:
    """Steps that change, add and remove modules, and one that changes setup.py."""
    stack = TinyStack(tmp_path_factory.mktemp("copied"))
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


def is_copy(stack: TinyStack, tree: Tree, tree_build: Build) -> bool:
    """Whether a build is a copy of another tree's."""
    return origin_of(Store(stack.cache).git, tree, tree_build.version) is not None


def test_only_modules_are_copied(stack: TinyStack):
    pairs = builds(stack)
    assert {slug: is_copy(stack, *pair) for slug, pair in pairs.items()} == {
        "base": False,
        "raise-value": True,
        "add-extra": True,
        "remove-extra": True,
        "change-setup": False,
        "after-setup": True,
        "last": False,
    }
    assert all(tree_build.cached for _, tree_build in pairs.values())


def test_every_copied_tree_is_what_a_real_build_installs(
    stack: TinyStack, backend: Server
):
    store = Store(stack.cache)
    for tree, tree_build in builds(stack).values():
        if is_copy(stack, tree, tree_build):
            assert compare(backend, store, tree, tree_build) > 5


def test_unchanged_files_are_links(written: TinyStack):
    pairs = builds(written)
    inodes = {
        (tree_build.installed / "vllm/platforms.py").stat().st_ino
        for _, tree_build in pairs.values()
    }
    assert len(inodes) == 1
    assert (pairs["add-extra"][1].installed / EXTRA).is_file()
    assert not (pairs["remove-extra"][1].installed / EXTRA).exists()


def test_no_copy_has_the_byte_code_of_another_source(written: TinyStack):
    """Python would write it anew on import, and so change the tree."""
    for _, tree_build in builds(written).values():
        site = tree_build.installed
        for source in site.glob("vllm/**/*.py"):
            code = site / byte_code_path(str(source.relative_to(site)))
            assert code.read_bytes()[8:16] == source_hash(source.read_bytes()), source


def test_a_copy_that_lacks_a_change_is_found(
    stack: TinyStack, backend: Server, monkeypatch: pytest.MonkeyPatch
):
    """A step of setup.py that nobody noticed changes METADATA."""
    script = BASE["setup.py"].replace("setup(", "setup(description='new', ")
    stack.add("describe", {"setup.py": script})
    stack.add("behind", {VALUE: TWO})
    shutil.rmtree(stack.cache.builds)
    monkeypatch.setattr(copy_module, "takes_part", lambda path, scripts: False)
    tree, tree_build = builds(stack)["describe"]
    assert is_copy(stack, tree, tree_build)
    with pytest.raises(CheckFailed, match="differs from what a real build") as caught:
        compare(backend, Store(stack.cache), tree, tree_build)
    assert caught.value.step == "describe"
    lines = caught.value.detail
    assert any(line.endswith("METADATA: its content differs") for line in lines)
    assert "setup.py: a real build does not install it" in lines


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
    messages: list[str] = []
    cache = Cache(stack.cache.root, progress=messages.append)
    trees = stack.trees()
    tree = next(tree for tree in trees if tree.slug == slug)
    version = build_version(tree, len(trees) - 1)
    with closing(backend_server(Runner())) as server:
        result = build(server, Store(cache), tree, version)
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
    if kind == "nothing":
        shutil.rmtree(site)
        return "vllm is missing"
    (site / "vllm/platforms.py").unlink()
    return "vllm/platforms.py is missing"


@pytest.mark.parametrize(
    "kind",
    ["flipped", "extra", "folder", "executable", "link", "missing", "nothing"],
)
@pytest.mark.parametrize("slug", ["add-extra", "change-setup"])
def test_an_installed_tree_is_verified_and_repaired(
    stack: TinyStack, slug: str, kind: str
):
    first, _ = again(stack, slug)
    assert first.cached
    problem = plant(first.installed, kind)
    repaired, messages = again(stack, slug)
    assert not repaired.cached and repaired.key == first.key
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

    monkeypatch.setattr("stack.builds.installed.os.link", refuse)
    copied, _ = again(stack, "add-extra")
    assert (copied.installed / EXTRA).stat().st_nlink == 1
    assert again(stack, "add-extra")[0].cached
