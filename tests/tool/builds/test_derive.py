# SPDX-License-Identifier: Apache-2.0
"""Trees derived from their neighbours: the same as real builds, or really built."""

import os
import shutil
from pathlib import Path

import pytest
from tiny_stack import BASE, HEADER, TWO, VALUE, TinyStack

from xpustack.base.store import Store
from xpustack.builds import build as build_module
from xpustack.builds import derive as derive_module
from xpustack.builds.build import Build, build, manifest_of, version_of
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
    """Each tree of v1.0 and its build, by slug, as a new run finds or makes them."""
    trees = stack.trees()
    made = stack.builds(Runner())
    slugs = [tree.label for tree in trees]
    return dict(zip(slugs, zip(trees, made, strict=True), strict=True))


def derived(stack: TinyStack, one: Build) -> bool:
    """Whether a build was made from another tree's."""
    manifest = manifest_of(stack.cache, one.key)
    return manifest is not None and manifest.origin is not None


def test_only_modules_are_derived(stack: TinyStack):
    made = builds(stack)
    assert {slug: derived(stack, one) for slug, (_, one) in made.items()} == {
        "base": False,
        "raise-value": True,
        "add-extra": True,
        "remove-extra": True,
        "change-setup": False,
        "after-setup": True,
        "last": False,
    }
    assert all(one.cached for _, one in made.values())


def test_every_derived_tree_is_what_a_real_build_installs(stack: TinyStack):
    for tree, one in builds(stack).values():
        if derived(stack, one):
            done = prove_equal(Runner(), stack.cache, Store(stack.cache), tree, one)
            assert done.members > 5


def test_unchanged_files_are_links(written: TinyStack):
    made = builds(written)
    inodes = {
        (one.installed / "vllm/platforms.py").stat().st_ino for _, one in made.values()
    }
    assert len(inodes) == 1
    assert (made["add-extra"][1].installed / EXTRA).is_file()
    assert not (made["remove-extra"][1].installed / EXTRA).exists()


def test_two_contents_of_one_size_differ_in_time(stack: TinyStack):
    """Else Python would take the byte code of one for that of the other."""
    made = builds(stack)
    one, two = (
        (made[slug][1].installed / VALUE).stat() for slug in ("base", "raise-value")
    )
    assert one.st_size == two.st_size and int(one.st_mtime) != int(two.st_mtime)


def damaged_after(stack: TinyStack, slug: str) -> CheckFailed:
    """What proves, after a faulty derivation, that a tree is not a real build's."""
    shutil.rmtree(stack.cache.builds)
    tree, one = builds(stack)[slug]
    assert derived(stack, one)
    with pytest.raises(CheckFailed, match="not what a real build") as caught:
        prove_equal(Runner(), stack.cache, Store(stack.cache), tree, one)
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
        return [one for one in real(*trees) if one.path != "setup.py"]

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
    made = [pair for pair in builds(stack).values() if derived(stack, pair[1])]
    proven = []
    for _ in range(5):
        chosen = next_to_prove(stack.cache, made)
        prove_equal(Runner(), stack.cache, store, *chosen)
        proven.append(chosen[0].step.slug)
    order = ["raise-value", "add-extra", "remove-extra", "after-setup"]
    assert proven == [*order, "raise-value"]
    assert next_to_prove(stack.cache, made[:2])[0].step.slug == "add-extra"


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
    """The build of a tree as a new run finds or makes it, and what it says."""
    cache = Cache(stack.cache.root)
    trees = stack.trees()
    tree = next(tree for tree in trees if tree.slug == slug)
    said: list[str] = []
    version = version_of(tree, len(trees) - 1)
    made = build(Runner(), cache, Store(cache), tree, version, progress=said.append)
    return made, said


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
    repaired, said = again(stack, slug)
    assert not repaired.cached and repaired.digest == first.digest
    assert f"building v1.0 {slug} again: {problem}" in said
    checked, said = again(stack, slug)
    assert checked.cached and said == []


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
    made, _ = again(stack, "add-extra")
    assert (made.installed / EXTRA).stat().st_nlink == 1
    assert again(stack, "add-extra")[0].cached


def _parent(git: object, tree: Tree, version: str) -> Tree | None:
    return tree.parent if "step" in version and tree.index else None
