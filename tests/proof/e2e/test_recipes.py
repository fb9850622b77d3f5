# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/data/recipes.csv, as published and as the page writes them for
XPU, and those of docs/deploying.md, up to the checks at start."""

import json
import shlex
from functools import partial
from pathlib import Path

import pytest
from fenced import block

from lab.planner.programs import shapes
from proof.e2e.checkpoints import checkpoint, dspark, vision
from proof.e2e.checkpoints.chat import ChatWriter
from proof.e2e.running.commands import ends
from proof.e2e.running.recipes import REFUSED, Option, Rule, converted, options, words
from proof.e2e.running.serving import Engines
from stack.base.releases import load
from stack.core.project import Project
from stack.core.rows import read_rows

pytestmark = pytest.mark.newest

DATA = Project.find(Path(__file__).parent).root / "docs/data"
ROWS = read_rows(DATA / "recipes.csv")
NAMES = [row["recipe"] for row in ROWS]
FLAGS = read_rows(DATA / "recipe_flags.csv")
RULES = [Rule.of(row) for row in FLAGS]
REFUSING = [rule for rule in RULES if rule.verdict == REFUSED]
STAGES = ("0731", "0813", "DSpark", "Vision")
"""In names of checkpoints: of those with DSpark's stages."""


def command(row: dict[str, str], column: str = "command") -> list[Option]:
    vllm, serve, model, *arguments = shlex.split(row[column])
    assert (vllm, serve, model) == ("vllm", "serve", row["model"])
    return options(arguments)


def of_the_page(name: str) -> tuple[str, list[Option]]:
    """The model and the options of the server that a block of deploying.md starts."""
    text = block("docs/deploying.md", name).replace("\\\n", " ")
    line = next(line for line in text.splitlines() if "vllm serve " in line)
    model, *given = shlex.split(line.partition("vllm serve ")[2])
    assert model.startswith("/path/to/")
    return model.replace("/path/to", "deepseek-ai"), options(given)


BLOCKS = ("serve", "few-cards", "apart", "v41", "two-hosts")
PAGE = {name: of_the_page(name) for name in BLOCKS}


def named(rule: Rule) -> str:
    return f"{rule.flag} of {rule.models}" if rule.models else rule.flag


def alone(rule: Rule) -> tuple[str, list[Option]]:
    """The model and the options of the first recipe that has what `rule` refuses, and
    nothing else that is not for XPU."""
    for row in ROWS:
        made = converted(row["model"], command(row), RULES)
        if rule in made.refusing:
            left = converted(row["model"], command(row), RULES, leave=rule)
            return row["model"], list(left.options)
    raise AssertionError(f"no recipe has {rule.flag}")


def folder_of(model: str, site: Path, work: Path) -> Path:
    """What a server is configured of: sizes as published, and a small tokenizer."""
    folder = work / model.partition("/")[2]
    if folder.is_dir():
        return folder
    folder.mkdir(parents=True)
    if "V4.1" in model:
        writer: checkpoint.Writer = shapes.V41(0)
        writer.write_tokenizer(folder)
        described = writer.config()
    else:
        size = shapes.size("pro" if "Pro" in model else "flash")
        described = shapes.Writer(size).config()
        ChatWriter(site).write_tokenizer(folder)
    if any(name in model for name in STAGES):
        described |= dspark.DSpark(0, {}).described() | {"num_nextn_predict_layers": 3}
    if "Vision" in model:
        described |= vision.TOWER
    (folder / "config.json").write_text(json.dumps(described))
    return folder


@pytest.fixture(scope="module")
def found(
    engines: Engines, release: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """How the commands end, by recipe and column, or by what is refused."""
    work = tmp_path_factory.mktemp("recipes")
    site = engines.installed(load(engines.project)[release], patched=True)
    folder = partial(folder_of, site=site, work=work)

    def arguments(model: str, given: list[Option]) -> list[str]:
        own = str(folder(model))
        return [own, *(word.replace(f'"{model}"', f'"{own}"') for word in words(given))]

    commands = {
        f"{row['recipe']}: {column}": arguments(row["model"], command(row, column))
        for row in ROWS
        for column in ("command", "on XPU")
    }
    commands |= {named(rule): arguments(*alone(rule)) for rule in REFUSING}
    for name, (model, given) in PAGE.items():
        commands[name] = arguments(model, given)
    return ends(engines, release, work, commands)


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_a_row_says_what_its_options_become(row: dict[str, str]) -> None:
    made = converted(row["model"], command(row), RULES).row(row["model"])
    assert {name: row[name] for name in made} == made


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_a_recipe_starts(found: dict[str, str], row: dict[str, str]) -> None:
    """The command for XPU does, and the published one unless an option is refused."""
    assert found[f"{row['recipe']}: on XPU"] == ""
    refusing = converted(row["model"], command(row), RULES).refusing
    end = found[f"{row['recipe']}: command"]
    if refusing:
        assert any(rule.says in end for rule in refusing), end
    else:
        assert end == ""


@pytest.mark.parametrize("name", PAGE)
def test_a_command_of_the_page_starts(found: dict[str, str], name: str) -> None:
    """Of docs/deploying.md."""
    assert found[name] == ""


@pytest.mark.parametrize("rule", REFUSING, ids=map(named, REFUSING))
def test_an_option_is_refused(found: dict[str, str], rule: Rule) -> None:
    assert rule.says and rule.says in found[named(rule)], found[named(rule)]


def test_each_row_of_flags_is_of_a_recipe() -> None:
    made = [converted(row["model"], command(row), RULES) for row in ROWS]
    assert frozenset[Rule]().union(*(one.rules for one in made)) == set(RULES)


def test_an_option_without_a_row_is_found() -> None:
    with pytest.raises(LookupError, match="no row for --enable-dbo"):
        converted("deepseek-ai/DeepSeek-V4-Pro", options(["--enable-dbo"]), RULES)
