# SPDX-License-Identifier: Apache-2.0
"""The order file: one patch per line, and help with a step's name."""

from pathlib import Path

import pytest
from fake_stack import FakeStack

from stack.core.errors import UsageError
from stack.series.order import (
    format_order,
    position,
    read_order,
    redo,
    require_step,
)


def test_quilt_can_follow_the_order_file() -> None:
    paths = [Path("patches/a/v1.0.patch"), Path("patches/b-c/v2.0.patch")]
    assert format_order(paths) == b"a/v1.0.patch\nb-c/v2.0.patch\n"


def test_comments_and_blank_lines_are_read_as_quilt_reads_them(
    stack: FakeStack,
) -> None:
    order = stack.project.series_dir("v1.0") / "series"
    lines = order.read_text().splitlines()
    order.write_text("# first\n\n" + "\n  \n# x.patch\n".join(lines) + "\n\n")
    assert stack.slugs() == ["first", "second", "third"]


def test_the_nearest_step_is_suggested(three_steps: FakeStack) -> None:
    slugs = read_order(three_steps.project, "v1.0")
    assert position(slugs, "second", "v1.0") == 2
    with pytest.raises(UsageError, match="did you mean second"):
        require_step(slugs, "secnod", "v1.0")


def test_the_hint_at_a_patch_reads_past_a_bad_line(stack: FakeStack) -> None:
    """It must not replace the patch's error by one about the order."""
    order = stack.project.series_dir("v1.0") / "series"
    order.write_text(order.read_text() + "no patch\n")
    hint = redo("v1.0", stack.patch("second"))
    assert "--upto first --to DIR" in hint
