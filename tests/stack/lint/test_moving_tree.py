# SPDX-License-Identifier: Apache-2.0
"""A checked-out tree that becomes another one: always the one that it says."""

import shutil
from pathlib import Path

from fake_stack import FakeStack

from stack.core.checkout import Checkout, check_out


def files(folder: Path) -> dict[Path, bytes]:
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_checked_out_tree_becomes_another(
    three_steps: FakeStack, tmp_path: Path
) -> None:
    series = three_steps.series()
    moving = Checkout(
        three_steps.cache.objects,
        work_tree=tmp_path / "tree",
        index=tmp_path / "index",
    )
    moving.work_tree.mkdir()
    for tree in (series.base, series.tip, series.base):
        moving.clean()
        moving.check_out(tree.tree_id)
        check_out(three_steps.cache, tree.tree_id, tmp_path / "fresh")
        assert files(moving.work_tree) == files(tmp_path / "fresh")
        shutil.rmtree(tmp_path / "fresh")
        (moving.work_tree / "vllm/rope.py").write_text("what a tool wrote")
        (moving.work_tree / "file\udce9").write_text("what a tool left")
