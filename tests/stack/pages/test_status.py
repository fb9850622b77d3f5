# SPDX-License-Identifier: Apache-2.0
"""The status matrix, and the README that must agree with it."""

import shutil
import tomllib
from pathlib import Path

import pytest
from tiny_stack import TinyStack

from stack.base import releases
from stack.checks.run import run
from stack.core.cache import Cache
from stack.core.errors import UsageError
from stack.core.project import Project
from stack.core.rows import read_rows
from stack.pages import status
from stack.pages.record import write_files
from stack.pages.status import StepStatus, matrix
from stack.series.order import read_order


def entry(release: str, step: str) -> StepStatus:
    return StepStatus(release, step, "subject", 3, 0, "Pending")


def test_slugs_keep_the_order_of_every_series():
    found = [
        entry("v1", "guards"),
        entry("v1", "layer"),
        entry("v2", "rope"),
        entry("v2", "layer"),
        entry("v2", "events"),
    ]
    rows = matrix(found, ("v1", "v2"))
    slugs = [slug for slug, _ in rows]
    assert slugs.index("guards") < slugs.index("layer")
    assert slugs.index("layer") < slugs.index("events")
    assert dict(rows)["guards"] == [found[0], None]


def stale(stack: TinyStack, pinned: releases.Releases) -> dict[Path, str]:
    """The pages that do not say what the series say, with their fresh texts."""
    fresh = status.pages(stack.project, pinned, "A row.")
    return {
        path: text
        for path, text in fresh.items()
        if not path.is_file() or path.read_text() != text
    }


def test_the_section_is_written_once_and_a_stale_one_is_refused(tiny: TinyStack):
    pinned = releases.load(tiny.project)
    readme = tiny.project.root / "README.md"
    begin, end = "<!-- status: begin -->", "<!-- status: end -->"
    text = f"# Stack\n\n{begin}\n{end}\n\nThe end.\n"
    readme.write_text(text)
    page = tiny.project.root / status.STEPS
    page.parent.mkdir(exist_ok=True)
    page.write_text("# Steps\n\n<!-- steps: begin -->\n<!-- steps: end -->\n")
    assert len(stale(tiny, pinned)) == 3
    write_files(status.pages(tiny.project, pinned, "A row."))
    assert stale(tiny, pinned) == {}
    written = readme.read_text()
    assert f"{begin}\nA row.\n{end}" in written
    assert written.startswith("# Stack\n") and written.endswith("\nThe end.\n")
    part = "| Elsewhere | switches, pages, what is refused | `raise-value` |"
    assert f"|---|---|---|\n{part}\n<!-- steps: end -->" in page.read_text()
    data = tiny.project.root / status.DATA
    assert read_rows(data) == [
        {
            "step": "raise-value",
            "release": release,
            "subject": "[XPU] Do raise-value",
            "lines": "2",
            "new": "0",
            "upstream": "Pending",
            "dropped when": "never",
        }
        for release in ("v1.0", "v2.0")
    ]
    for path, old, new in ((data, ",2,", ",3,"), (page, "raise-", "lower-")):
        text = path.read_text()
        path.write_text(text.replace(old, new))
        assert stale(tiny, pinned) == {path: text}
        path.write_text(text)
    page.write_text("no section\n")
    with pytest.raises(UsageError, match="no section steps"):
        status.pages(tiny.project, pinned, "A row.")
    readme.write_text("no section\n")
    with pytest.raises(UsageError, match="no section"):
        status.pages(tiny.project, pinned, "A row.")


def test_checks_as_this_machine_knows_them(tmp_path, tiny: TinyStack):
    stack = tiny.copy(tmp_path)
    # What other tests built and proved with the shared cache is not known here.
    for left in (stack.cache.builds, stack.cache.results):
        shutil.rmtree(left, ignore_errors=True)
    pinned = releases.load(stack.project)
    unknown = status.checked_statuses(stack.project, Cache(tmp_path / "none"), pinned)
    assert [one.checks for one in unknown] == [None] * 2
    assert status.cell(unknown[0]) == "unknown, 2 lines, Pending"
    stack.split("raise-value", "v2.0")
    run(stack.project, stack.cache, [pinned["v1.0"]])
    patch = stack.patch("raise-value", "v2.0")
    patch.write_text(patch.read_text().replace("Why.", "Why not."))
    green, red = status.checked_statuses(stack.project, stack.cache, pinned)
    assert green.checks == "green"
    assert red.checks == "not checked here"
    assert status.cell(green) == "green, 2 lines, Pending"


def test_a_part_names_steps_that_a_series_has(real_project: Project):
    """A step that no part names is shown at the end; a name of nothing is an error."""
    slugs = {
        slug
        for release in releases.load(real_project)
        for slug in read_order(real_project, release.name)
    }
    parts = tomllib.loads(status.PARTS.read_text())["part"]
    assert [slug for part in parts for slug in part["steps"] if slug not in slugs] == []
