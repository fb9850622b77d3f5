# SPDX-License-Identifier: Apache-2.0
"""CHANGELOG.md: the tool adds lines and keeps those of people."""

from xpustack.pages.changelog import with_changes
from xpustack.series.revision import Change

ORDER = ("v1.0", "v2.0")
SUBJECTS = {"sink": "[XPU][DSv4] Honour the sink", "rope": "[XPU] Turn by position"}


def change(added=(), changed=(), dropped=(), moved=False) -> Change:
    return Change(tuple(added), tuple(changed), tuple(dropped), moved)


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("#", "-"))]


def test_a_first_record_lists_the_steps_by_subject():
    steps = change(["sink", "rope"])
    text = with_changes("", "v1.0", 1, steps, SUBJECTS, ORDER, first=True)
    assert "\n\nThe first recorded revision. Its steps:\n\n- `sink`" in text
    assert lines(text) == [
        "# Changelog",
        "## v1.0",
        "### Revision 1",
        "- `sink`: Honour the sink",
        "- `rope`: Turn by position",
    ]
    again = with_changes("", "v1.0", 2, steps, SUBJECTS, ORDER)
    assert "- Added `sink`: Honour the sink" in again


def test_newer_releases_and_revisions_stand_first():
    text = with_changes("", "v1.0", 1, change(["sink"]), SUBJECTS, ORDER)
    text = with_changes(text, "v2.0", 1, change(["sink"]), SUBJECTS, ORDER)
    text = with_changes(text, "v1.0", 2, change([], ["sink"]), SUBJECTS, ORDER)
    assert [line for line in lines(text) if line.startswith("#")] == [
        "# Changelog",
        "## v2.0",
        "### Revision 1",
        "## v1.0",
        "### Revision 2",
        "### Revision 1",
    ]


def test_what_people_wrote_is_kept():
    text = with_changes("", "v1.0", 1, change(["sink", "rope"]), SUBJECTS, ORDER)
    text = text.replace("- Added `sink`: Honour the sink", "- `sink` counts now. Good!")
    text = text.replace("# Changelog\n", "# Changelog\n\nRead this first.\n")
    text = text.replace("### Revision 1\n", "### Revision 1\n\nThe first one.\n")
    again = with_changes(
        text, "v1.0", 1, change([], ["sink"], ["rope", "old"], True), SUBJECTS, ORDER
    )
    for line in ("Read this first.", "The first one.", "- `sink` counts now. Good!"):
        assert again.count(line) == 1
    assert "Changed `sink`" not in again
    assert again.count("- Dropped `old`") == 1
    assert again.count("- The order of the steps changed") == 1


def test_adding_nothing_changes_nothing():
    text = with_changes("", "v1.0", 1, change(["sink"]), SUBJECTS, ORDER)
    assert with_changes(text, "v1.0", 1, change(), SUBJECTS, ORDER) == text
