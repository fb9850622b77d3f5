# SPDX-License-Identifier: Apache-2.0
"""A checked-out tree that becomes another one: always the one that it says."""

import shutil
from pathlib import Path

from fake_stack import FakeStack

from xpustack.base.store import Store
from xpustack.core.checkout import check_out
from xpustack.lint.hook_runner import MovingTree


def files(folder: Path) -> dict[Path, bytes]:
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_checked_out_tree_becomes_another(
    three_steps: FakeStack, tmp_path: Path
) -> None:
    store = Store(three_steps.cache)
    series = three_steps.series()
    base, last = series.base, series.tip
    moving = MovingTree(store, tmp_path / "tree", tmp_path / "index")
    moving.move(base)
    for tree in (last, base):
        (moving.folder / "vllm/rope.py").write_text("what a tool wrote")
        (moving.folder / "file\udce9").write_text("what a tool left")
        moving.move(tree)
        check_out(three_steps.cache, tree.tree_id, tmp_path / "fresh")
        assert files(moving.folder) == files(tmp_path / "fresh")
        shutil.rmtree(tmp_path / "fresh")
