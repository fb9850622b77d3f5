# SPDX-License-Identifier: Apache-2.0
"""The rows of quantizations agree with the step that refuses them."""

import ast
from collections import Counter
from pathlib import Path

from stack.base.releases import load
from stack.core.project import Project
from stack.core.rows import read_rows

ROOT = Path(__file__).parents[3]
ROWS = read_rows(ROOT / "docs/data/quantization.csv")
REFUSED = ROOT / "tests/steps/policy/quantizations.py"
SERVED = ROOT / "tests/steps/helpers/quantizations.py"
NAMES = load(Project(ROOT)).names


def releases(text: str) -> list[str]:
    first, to, last = text.partition(" to ")
    if to:
        return list(NAMES[NAMES.index(first) : NAMES.index(last) + 1])
    return text.split(", ")


def kinds(module: Path, name: str) -> set[str]:
    """The keys of a table of the step's test."""
    for node in ast.parse(module.read_text()).body:
        named = isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name
        if named and isinstance(node.value, ast.Dict):
            return {ast.literal_eval(key) for key in node.value.keys if key}
    raise AssertionError(f"{module.name} has no table {name}")


def test_every_kind_has_one_row_for_each_release() -> None:
    pairs = Counter(
        (row["quantization"], release)
        for row in ROWS
        for release in releases(row["releases"])
    )
    known = kinds(REFUSED, "REFUSED") | kinds(SERVED, "KINDS")
    assert pairs == Counter((kind, release) for kind in known for release in NAMES)


def test_what_is_refused_everywhere_is_called_so() -> None:
    refused = {row["quantization"] for row in ROWS if row["verdict"] == "refuses"}
    served = {row["quantization"] for row in ROWS if row["verdict"] != "refuses"}
    assert kinds(REFUSED, "REFUSED") == refused - served
    assert {row["verdict"] for row in ROWS} <= {"serves", "refuses"}
