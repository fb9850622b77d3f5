# SPDX-License-Identifier: Apache-2.0
"""CHANGELOG.md: the tool adds lines and keeps those of people."""

import pytest

from xpustack.pages.changelog import Changelog
from xpustack.series.revision import Change

ORDER = ("v1.0", "v1.1", "v2.0", "v3.0")
SUBJECTS = {"sink": "[XPU][DSv4] Honour the sink", "rope": "[XPU] Turn by position"}


def change(added=(), changed=(), dropped=(), moved=False) -> Change:
    return Change(tuple(added), tuple(changed), tuple(dropped), moved)


def recorded(text: str, revision: int, what: Change, *releases: str, **more) -> str:
    """The text after one stamp of the releases."""
    log = Changelog(text, ORDER)
    for release in releases:
        log.add(release, revision, what, SUBJECTS, **more)
    return log.text()


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("#", "-", "Wheels"))]


def test_a_first_record_lists_the_steps_by_subject():
    text = recorded("", 1, change(["sink", "rope"]), "v1.0", first=True)
    assert lines(text) == [
        "# Changelog",
        "## 1.0+xpu.dsv4.1",
        "Wheels: `1.0+xpu.dsv4.1`",
        "- `sink`: Honour the sink (v1.0)",
        "- `rope`: Turn by position (v1.0)",
    ]
    again = recorded(text, 2, change(["sink"]), "v1.0")
    assert "- Added `sink`: Honour the sink (v1.0)" in again


@pytest.mark.parametrize(
    ("releases", "ending"),
    [
        (["v1.0", "v3.0"], "(v1.0, v3.0)"),
        (["v1.1", "v1.0"], "(v1.0, v1.1)"),
        (["v3.0", "v1.1", "v2.0"], "(v1.1 to v3.0)"),
        (["v0.1", "v1.0"], "(v0.1, v1.0)"),
    ],
)
def test_one_line_names_its_releases(releases: list[str], ending: str):
    text = recorded("", 1, change(["sink"]), *releases)
    assert lines(text)[3:] == [f"- Added `sink`: Honour the sink {ending}"]
    assert recorded(text, 1, change(["sink"]), *releases) == text


def test_a_later_stamp_of_the_same_revision_joins_its_lines():
    text = recorded("", 1, change(["sink"]), "v1.0", "v1.1", "v2.0")
    log = Changelog(text, ORDER)
    log.add("v3.0", 1, change(["sink"]), SUBJECTS)
    log.add("v1.0", 1, change([], ["rope"]), SUBJECTS, kept="not built")
    log.add("v1.1", 1, change([], ["rope"]), {"rope": "Turn"}, kept="not built")
    assert lines(log.text())[1:] == [
        "## 3.0+xpu.dsv4.1",
        "Wheels: `3.0+xpu.dsv4.1`",
        "- Added `sink`: Honour the sink (v3.0)",
        "## 2.0+xpu.dsv4.1",
        "Wheels: `2.0+xpu.dsv4.1`, `1.1+xpu.dsv4.1`, `1.0+xpu.dsv4.1`",
        "- Added `sink`: Honour the sink (v1.0 to v2.0)",
        "- Changed `rope`: Turn by position (v1.0)",
        "- Recorded again under this number: not built (v1.0, v1.1)",
        "- Changed `rope`: Turn (v1.1)",
    ]


def test_newer_sections_stand_first():
    text = recorded("", 1, change(["sink"]), "v1.0", "v2.0")
    text = recorded(text, 2, change([], ["sink"]), "v1.0")
    assert [line for line in lines(text) if line.startswith("#")] == [
        "# Changelog",
        "## 1.0+xpu.dsv4.2",
        "## 2.0+xpu.dsv4.1",
    ]


def test_what_people_wrote_is_kept():
    text = recorded("", 1, change(["sink", "rope"]), "v1.0")
    text = text.replace("- Added `sink`: Honour the sink", "- `sink` counts. Good!")
    text = text.replace("# Changelog\n", "# Changelog\n\nRead this first.\n")
    text = text.replace("- `sink`", "The first one.\n\n- `sink`")
    again = recorded(text, 1, change([], ["sink"], ["rope", "old"], True), "v1.0")
    for line in ("Read this first.", "The first one.", "- `sink` counts. Good! (v1.0)"):
        assert again.count(line) == 1
    assert "Changed `sink`" not in again
    assert again.count("- Dropped `old` (v1.0)") == 1
    assert again.count("- The order of the steps changed (v1.0)") == 1


def test_adding_nothing_changes_nothing():
    text = recorded("", 1, change(["sink"]), "v1.0")
    assert recorded(text, 1, change(), "v1.0") == text
