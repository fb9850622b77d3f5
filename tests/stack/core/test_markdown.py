# SPDX-License-Identifier: Apache-2.0
"""Tables, and the generated section of a page."""

from pathlib import Path

import pytest

from stack.core.errors import UsageError
from stack.core.markdown import table, with_section


def test_a_table_has_a_line_for_each_row() -> None:
    assert table(("a", "b"), [(1, ""), ("`x`", None)]) == (
        "| a | b |\n|---|---|\n| 1 |  |\n| `x` | None |"
    )
    assert table(("a",), []) == "| a |\n|---|"


def test_a_cell_cannot_end_its_row() -> None:
    assert table(("a",), [("1 | 2\n3",)]) == "| a |\n|---|\n| 1 \\| 2 3 |"


PAGE = "# Page\n<!-- x: begin -->\n{}<!-- x: end -->\nThe end.\n"


@pytest.mark.parametrize("old", ["", "old\n", "old\n\n<!-- y: begin -->\n"])
def test_only_the_section_is_replaced(tmp_path: Path, old: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.format(old))
    assert with_section(page, "x", "new") == PAGE.format("new\n")


@pytest.mark.parametrize(
    "text", [None, "# Page\n", "<!-- x: begin -->\n", "<!-- x: end -->\n"]
)
def test_a_page_without_the_section_is_refused(
    tmp_path: Path, text: str | None
) -> None:
    page = tmp_path / "page.md"
    if text is not None:
        page.write_text(text)
    with pytest.raises(UsageError, match="no section x") as caught:
        with_section(page, "x", "new")
    assert "<!-- x: begin -->" in (caught.value.hint or "")


def test_a_section_that_is_written_again_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.format(""))
    page.write_text(with_section(page, "x", "one\n\ntwo"))
    assert with_section(page, "x", "one\n\ntwo") == page.read_text()
