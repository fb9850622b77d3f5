# SPDX-License-Identifier: Apache-2.0
"""Every fenced block of README, CONTRIBUTING and deploying is run, or says why not."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from clean_user import CleanUser
from fenced import fenced

from stack.core.cache import Cache

ROOT = Path(__file__).parents[3]
KNOWN: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("blocks.toml").read_text()
)
FOUND = {page: fenced(page) for page in KNOWN}
TEXTS = {(page, one.name): one.text for page in KNOWN for one in FOUND[page]}
DOOR = "bin:$PATH"
"""A page puts `bin` on the path by itself, in its first block or sentence."""


def cases(*keys: str) -> list[Any]:
    """Those of the blocks that have one of the keys."""
    return [
        pytest.param(page, name, id=f"{Path(page).stem}-{name}")
        for page, blocks in KNOWN.items()
        for name, how in blocks.items()
        if set(keys) & set(how)
    ]


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory, real_cache: Cache) -> CleanUser:
    return CleanUser(tmp_path_factory.mktemp("user"), real_cache.sdists)


def typed(user: CleanUser, page: str, name: str) -> str:
    """What a block prints, after those before it."""
    how = KNOWN[page][name]
    if before := how.get("after"):
        typed(user, page, before)
    block = TEXTS[page, name]
    status, printed = user.type(block, door=DOOR not in block)
    assert status == 0, printed
    return printed


def slow(request: pytest.FixtureRequest, page: str, name: str) -> None:
    how = KNOWN[page][name]
    if how.get("run") == "--as-a-user" and not request.config.option.as_a_user:
        pytest.skip("takes minutes: --as-a-user")


@pytest.mark.parametrize("page", KNOWN)
def test_each_block_is_known_by_its_name(page: str):
    assert sorted(one.name for one in FOUND[page]) == sorted(KNOWN[page])
    for how in KNOWN[page].values():
        assert len({"run", "of", "by", "not"} & set(how)) == 1


@pytest.mark.parametrize(("page", "name"), cases("run", "by", "not"))
def test_a_shell_reads_each_block(page: str, name: str):
    language = next(one.language for one in FOUND[page] if one.name == name)
    if language == "sh":
        command = ["sh", "-n", "-c", TEXTS[page, name]]
        subprocess.run(command, check=True, capture_output=True)
    elif language == "python":
        compile(TEXTS[page, name], page, "exec")


@pytest.mark.parametrize(("page", "name"), cases("by"))
def test_a_test_takes_the_block_from_its_page(page: str, name: str):
    text = (ROOT / KNOWN[page][name]["by"]).read_text()
    assert Path(page).name in text
    assert f'"{name}"' in text


@pytest.mark.parametrize(("page", "name"), cases("run"))
def test_a_clean_user_runs_it(
    request: pytest.FixtureRequest, page: str, name: str
) -> None:
    slow(request, page, name)
    typed(request.getfixturevalue("user"), page, name)


@pytest.mark.parametrize(("page", "name"), cases("of"))
def test_a_block_shows_what_is_printed(
    request: pytest.FixtureRequest, page: str, name: str
) -> None:
    """Line by line; what `…` stands for is left out."""
    of = KNOWN[page][name]["of"]
    slow(request, page, of)
    printed = typed(request.getfixturevalue("user"), page, of)
    for line in TEXTS[page, name].splitlines():
        parts = map(re.escape, line.strip().split("…"))
        assert re.search(".*".join(parts), printed), (line, printed)


@pytest.mark.parametrize(("page", "name"), cases("flags_of"))
def test_a_server_is_started_as_the_plan_says(
    request: pytest.FixtureRequest, page: str, name: str
) -> None:
    of = KNOWN[page][name]["flags_of"]
    slow(request, page, of)
    printed = typed(request.getfixturevalue("user"), page, of)
    said = " ".join(TEXTS[page, name].replace("\\\n", " ").split())
    (flags,) = re.findall(r"--tensor-parallel-size .*--enable-auto-tool-choice", said)
    assert flags in " ".join(printed.split())
