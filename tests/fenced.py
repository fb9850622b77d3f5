# SPDX-License-Identifier: Apache-2.0
"""The fenced blocks of a page, whose names follow their languages."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_FENCE = re.compile(r"^```(\w*) ?(.*)\n((?:.*\n)*?)```$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    language: str
    name: str
    text: str


def fenced(page: str) -> list[Block]:
    """All blocks of a page, in order."""
    text = (ROOT / page).read_text("utf-8")
    found = [Block(*parts) for parts in _FENCE.findall(text)]
    assert text.count("\n```") == 2 * len(found), page
    return found


def block(page: str, name: str) -> str:
    """The text of the one block of that name."""
    (found,) = (one.text for one in fenced(page) if one.name == name)
    return found
