# SPDX-License-Identifier: Apache-2.0
"""Every command in a block of a page is one that the tool has, spelt as it is there."""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from lab.benchmarks.xpu_path.ranks.two_gpus import TWO_JOBS
from stack.core.project import Project
from stack.core.rows import read_rows
from stack.pages.made import COMMAND, TREE, tables
from stack.release.ship import COMPANION_FILES
from stack.series.order import read_order
from xpustack.__main__ import app

ROOT = Path(__file__).parents[3]
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md"] + [
    f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))
]
WHEEL = "vllm-*.whl"


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command in the shell's blocks, comments left out."""
    for block in re.findall(r"^```sh\b.*\n((?:.*\n)*?)```", text, re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.replace("…", ""), comments=True)
            while words:
                end = next(
                    (i for i, word in enumerate(words) if word in ("&&", "|", ";")),
                    len(words),
                )
                yield words[:end]
                words = words[end + 1 :]


def named(text: str) -> set[str]:
    """The environments of tox that a page names, in blocks and in sentences."""
    return set(re.findall(r"tox (?:run |exec )?-e ([a-z0-9-]+)", text))


@pytest.mark.parametrize("page", PAGES)
def test_a_command_of_ours_takes_its_words(page: str):
    for words in commands((ROOT / page).read_text()):
        if words[0] == "xpustack":
            _, _, unknown, *_ = app.parse_known_args(words[1:])
            assert unknown == [], words
        if words[:2] in (["python", "-m"], ["python3", "-m"]) and "." not in words[2]:
            assert importlib.util.find_spec(words[2]), words


def test_a_command_that_renews_rows_is_one_of_ours():
    settings = (ROOT / "tox.ini").read_text()
    for table in tables(Project(ROOT)).values():
        words = shlex.split(table.command)
        if words[:1] == ["xpustack"]:
            _, _, unknown, *_ = app.parse_known_args(words[1:])
            assert unknown == [], words
        elif words:
            assert f"[testenv:{words[words.index('-e') + 1]}]" in settings, words
        if "python" in words:
            assert importlib.util.find_spec(words[words.index("-m") + 1]), words


@pytest.mark.parametrize("name", [*tables(Project(ROOT))])
def test_the_command_of_a_row_is_one_of_ours(name: str):
    rows = read_rows(ROOT / f"docs/data/{name}.csv")
    for command in {row["command"] for row in rows if {TREE, COMMAND} <= row.keys()}:
        words = shlex.split(command)
        if words[0] == "xpustack":
            _, _, unknown, *_ = app.parse_known_args(words[1:])
            assert unknown == [], command
        else:
            assert words[1] == "-m", command
            assert importlib.util.find_spec(words[2]), command
        if name == "two_gpus":
            assert set(words[words.index("OUT") + 1 :]) <= TWO_JOBS.keys(), command


@pytest.mark.parametrize("page", PAGES)
def test_a_step_that_a_command_names_is_in_its_series(page: str):
    commands = r"(?:xpustack check|apply-and-test --|stack.mutation)"
    named = rf"{commands} (v[\d.]+) ([a-z][a-z\d-]+)"
    for release, step in re.findall(named, (ROOT / page).read_text()):
        assert step in read_order(Project(ROOT), release), (release, step)


def test_each_claim_has_one_command():
    rows = re.findall(r"^\| (.*) \|$", (ROOT / "docs/proven.md").read_text(), re.M)
    heads, _, *claims = (row.split(" | ") for row in rows)
    assert heads[2] == "repeat it"
    for claim in claims:
        assert re.fullmatch(r"`(?:tox|xpustack) [^`]+`", claim[2]), claim


@pytest.mark.parametrize("page", PAGES)
def test_the_tool_has_one_name(page: str):
    assert "-m xpustack" not in (ROOT / page).read_text()


@pytest.mark.parametrize("page", PAGES)
def test_an_environment_of_tox_exists(page: str):
    settings = (ROOT / "tox.ini").read_text()
    found = named((ROOT / page).read_text())
    assert [name for name in found if f"[testenv:{name}]" not in settings] == []


@pytest.mark.parametrize("page", PAGES)
def test_a_file_beside_a_wheel_is_one_that_a_build_writes(page: str):
    text = (ROOT / page).read_text()
    for name in re.findall(r"dist/v[\d.]+/([\w.*-]+\w)", text):
        assert name in COMPANION_FILES or fnmatch(WHEEL, name) or name == WHEEL, name


def test_a_word_in_a_sentence_is_a_command():
    for page in PAGES:
        words = re.findall(r"`xpustack ([a-z-]+)", (ROOT / page).read_text())
        assert set(words) <= set(app), page
