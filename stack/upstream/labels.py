# SPDX-License-Identifier: Apache-2.0
"""The labels that the base's own rules for Mergify give a pull request."""

import re
from collections.abc import Sequence

import yaml

RULES = ".github/mergify.yml"
_CONDITION = re.compile(r"(-?)(files|title)(~?=)(.*)", re.DOTALL)


def labels(rules: str, title: str, files: Sequence[str]) -> tuple[str, ...]:
    """The labels that a request with this title and these files gets, sorted.

    Args:
        rules: the text of the base's file; it may be empty.
    """
    found = set()
    for rule in (yaml.safe_load(rules) or {}).get("pull_request_rules", []):
        conditions = rule.get("conditions", [])
        about = [part for part in conditions if _about(part)]
        if about and all(_holds(part, title, files) for part in about):
            found.update(rule.get("actions", {}).get("label", {}).get("add", ()))
    return tuple(sorted(found))


def _about(condition: object) -> bool:
    """Whether a condition is about titles or files, not about labels and checks."""
    if isinstance(condition, dict):
        return any(_about(part) for parts in condition.values() for part in parts)
    return bool(_CONDITION.fullmatch(str(condition)))


def _holds(condition: object, title: str, files: Sequence[str]) -> bool:
    if isinstance(condition, dict):
        ((word, parts),) = condition.items()
        held = (_holds(part, title, files) for part in parts if _about(part))
        return any(held) if word == "or" else all(held)
    match = _CONDITION.fullmatch(str(condition))
    assert match is not None, "it is about titles or files"
    negated, subject, operator, pattern = match.groups()
    texts = files if subject == "files" else [title]
    if operator == "=":
        held_by = any(text == pattern for text in texts)
    else:
        held_by = any(re.search(pattern, text) for text in texts)
    return held_by != bool(negated)
