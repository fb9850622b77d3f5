# SPDX-License-Identifier: Apache-2.0
"""The page of a server's speed follows from its rows."""

from pathlib import Path

from lab.aot.costs import step, step_page
from stack.core.markdown import with_section
from stack.core.rows import read_rows

PAGE = Path(__file__).parents[3] / "docs/speed.md"


def rows(name: str) -> list[dict[str, object]]:
    """The rows of a file as the program that writes it has them."""
    return [
        {**row, "context": int(row["context"]), "requests": int(row["requests"])}
        for row in read_rows(PAGE.parent / name)
    ]


def test_the_page_shows_the_rows() -> None:
    for section, shown in (
        (
            step_page.SECTION,
            step_page.summary(rows(step_page.PARTS), rows(step_page.SPEED)),
        ),
        (
            step_page.SHARING_SECTION,
            step_page.sharing_summary(rows(step_page.SHARING)),
        ),
    ):
        assert with_section(PAGE, section, shown) == PAGE.read_text("utf-8")


def test_the_rows_count_the_launches_of_today() -> None:
    """Other parts follow from machine code, which takes minutes to compile."""
    shown = {
        (row["devices"], row["model"]): (row["ms from"], row["ms to"])
        for row in rows(step_page.PARTS)
        if row["part"] == step.LAUNCHES
    }
    gap = step.constants()["device_launch"]["microseconds"]
    assert shown == {
        (of.name, of.model.name): tuple(
            f"{end * count / 1000:.2f}"
            for end, count in zip(gap, (n.fast, n.slow), strict=True)
        )
        for of in step_page.bought()
        for n in [step.launches(of.model)]
    }
