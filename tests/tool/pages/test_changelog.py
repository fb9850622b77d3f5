# SPDX-License-Identifier: Apache-2.0
"""CHANGELOG.md: the tool adds lines and keeps those of people."""

import pytest

from xpustack.pages.changelog import Entry, with_entries
from xpustack.series.revision import Change

ORDER = ("v1.0", "v1.1", "v2.0", "v3.0")
SUBJECTS = {"sink": "[XPU][DSv4] Honour the sink", "rope": "[XPU] Turn by position"}


def change(added=(), changed=(), dropped=(), moved=False) -> Change:
    return Change(tuple(added), tuple(changed), tuple(dropped), moved)


def stamped(text: str, number: int, what: Change, *releases: str, **more) -> str:
    """The text after one stamp of the releases."""
    entries = {
        name: Entry(f"{name[1:]}+xpu.dsv4.{number}", what, SUBJECTS, **more)
        for name in releases
    }
    return with_entries(text, entries, ORDER)


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("#", "-", "Wheels"))]


def test_a_first_record_lists_the_steps_by_subject():
    text = stamped("", 1, change(["sink", "rope"]), "v1.0", "v2.0", first=True)
    assert lines(text) == [
        "# Changelog",
        "## 2.0+xpu.dsv4.1",
        "Wheels: `2.0+xpu.dsv4.1`, `1.0+xpu.dsv4.1`",
        "- `sink`: Honour the sink (v1.0, v2.0)",
        "- `rope`: Turn by position (v1.0, v2.0)",
    ]


@pytest.mark.parametrize(
    ("releases", "ending"),
    [
        (["v1.0", "v3.0"], "(v1.0, v3.0)"),
        (["v1.1", "v1.0"], "(v1.0, v1.1)"),
        (["v3.0", "v1.1", "v2.0"], "(v1.1 to v3.0)"),
        (["v1.0", "v1.1", "v2.0", "v3.0"], "(v1.0 to v3.0)"),
    ],
)
def test_one_line_names_its_releases(releases: list[str], ending: str):
    text = stamped("", 1, change(["sink"]), *releases)
    assert lines(text)[3:] == [f"- Added `sink`: Honour the sink {ending}"]


def test_releases_that_differ_have_lines_of_their_own():
    entries = {
        "v1.0": Entry("1.0+xpu.dsv4.2", change(["sink"]), SUBJECTS),
        "v1.1": Entry("1.1+xpu.dsv4.2", change([], ["sink"]), SUBJECTS),
    }
    assert lines(with_entries("", entries, ORDER))[3:] == [
        "- Added `sink`: Honour the sink (v1.0)",
        "- Changed `sink`: Honour the sink (v1.1)",
    ]


def test_newer_sections_stand_first():
    text = stamped("", 1, change(["sink"]), "v1.0", "v2.0")
    text = stamped(text, 2, change([], ["sink"]), "v1.0")
    assert [line for line in lines(text) if line.startswith("#")] == [
        "# Changelog",
        "## 1.0+xpu.dsv4.2",
        "## 2.0+xpu.dsv4.1",
    ]
    assert "\n\n\n" not in text


def test_what_people_wrote_is_kept():
    text = stamped("", 2, change(["sink"], ["rope"]), "v1.0")
    text = text.replace("`sink`: Honour the sink", "`sink`: it counts. Good!")
    text = text.replace("# Changelog\n", "# Changelog\n\nRead this first.\n")
    what = change(["sink"], ["rope"], ["old"], True)
    again = stamped(text, 2, what, "v1.0", kept="not built")
    assert again == text + (
        "- Dropped `old` (v1.0)\n"
        "- The order of the steps changed (v1.0)\n"
        "- Recorded again under this number: not built (v1.0)\n"
    )


def test_a_change_of_other_releases_and_another_reason_are_told():
    text = stamped("", 1, change([], ["rope"]), "v1.0", "v1.1", kept="not built")
    again = stamped(text, 1, change([], ["rope"]), "v1.0", kept="nor sent")
    assert again == text + (
        "- Changed `rope`: Turn by position (v1.0)\n"
        "- Recorded again under this number: nor sent (v1.0)\n"
    )


def test_adding_nothing_changes_nothing():
    text = stamped("", 1, change(["sink"]), "v1.0")
    assert stamped(text, 1, change(), "v1.0") == text
    assert with_entries(text, {}, ORDER) == text
