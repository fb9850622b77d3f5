# SPDX-License-Identifier: Apache-2.0
"""The README: its table of releases, its length, and what it promises to run."""

import re
from pathlib import Path

import pytest
from tiny_stack import TinyStack

from stack.base import releases
from stack.core.project import Project
from stack.pages.made import tree_of
from stack.pages.overview import overview
from stack.pages.status import README, SECTION, pages

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def readme() -> str:
    return (ROOT / README).read_text()


def test_each_release_has_a_row_of_its_series_and_its_runs(
    tmp_path: Path, tiny: TinyStack
):
    stack = tiny.copy(tmp_path)
    stack.write(
        "tests/steps/defects.toml",
        '[[defect]]\nid = "N1"\nwhat = "low"\nstep = "raise-value"\n'
        'elsewhere = { "v2.0" = "never low" }\n'
        '[[defect]]\nid = "N1"\nwhat = "lower"\nstep = "raise-value"\n',
    )
    stack.write(
        "docs/data/e2e.csv",
        'release,"core %, untouched"\nv2.0,35.52\nv2.0,174.6\nv1.0,\n',
    )
    now = tree_of(stack.project, "v2.0")
    served = 'flash,Flash,serves,"attention 0.2 %, output 0.1 %"'
    runs = (
        "release,checkpoint,what,verdict,why,tree_id\nv2.0,pro,Pro,wrong,no,\n"
        f"v2.0,{served},{now}\nv1.0,{served},0123456789ab\n"
    )
    stack.write("docs/data/checkpoints.csv", runs)
    table = overview(stack.project, releases.load(stack.project))
    assert table.splitlines()[2:] == [
        "| v2.0 | attention off by 36 to 175 % | 1"
        " | serves, attention off by 0.2 % | `2.0+xpu.dsv4.1` |",
        "| v1.0 | does not start | 1 | not run on this revision | `1.0+xpu.dsv4.1` |",
    ]


def test_the_readme_is_fresh(real_project: Project):
    pinned = releases.load(real_project)
    fresh = pages(real_project, pinned, overview(real_project, pinned))
    assert {path: path.read_text() for path in fresh} == fresh


def test_the_readme_takes_two_screens(readme: str):
    """Without the rows of the releases, of which there are more each month."""
    before, _, rest = readme.partition(f"<!-- {SECTION}: begin -->")
    _, _, after = rest.partition(f"<!-- {SECTION}: end -->")
    assert len((before + after).splitlines()) <= 90


def test_the_honest_line_stands_at_the_top(readme: str):
    top = "\n".join(readme.splitlines()[:14])
    assert "has run on an Intel GPU yet" in top


def test_every_link_leads_to_a_file(readme: str):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", readme)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
