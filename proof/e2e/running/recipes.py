# SPDX-License-Identifier: Apache-2.0
"""Commands that others publish for DeepSeek-V4, and what becomes of each on XPU."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

KEPT, CHANGED, DROPPED, REFUSED = "kept", "changed", "dropped", "refused"
WHOLE = ("--kv-transfer-config",)
"""Options whose keys go together: without its connector the rest means nothing."""


@dataclass(frozen=True)
class Rule:
    """What XPU makes of an option, or of a key of an option in JSON: a row of
    `docs/data/recipe_flags.csv`.

    Attributes:
        flag: the option and its value, `*` for any; a key follows a dot.
        models: "V4" or "V4.1"; empty for both.
        verdict: one of those above.
        becomes: what is put in its place.
        says: words of the message, where a start with it is refused.
    """

    flag: str
    models: str
    verdict: str
    becomes: str
    says: str

    @classmethod
    def of(cls, row: Mapping[str, str]) -> "Rule":
        verdict = row["on XPU"]
        return cls(row["flag"], row["models"], verdict, row["becomes"], row["says"])

    def concerns(self, model: str, flag: str) -> bool:
        mine = not self.models or self.models == generation(model)
        return mine and fnmatchcase(flag, self.flag)


@dataclass(frozen=True)
class Option:
    """An option of a command with its value, which is empty for a switch."""

    name: str
    value: str

    @property
    def keys(self) -> dict[str, Any] | None:
        """Those of a value in JSON."""
        return json.loads(self.value) if self.value.startswith("{") else None

    def words(self) -> list[str]:
        return [self.name, self.value] if self.value else [self.name]


@dataclass(frozen=True)
class Converted:
    """A command for XPU.

    Attributes:
        kept: names of options that stay, perhaps with fewer keys.
        parted: each part that becomes another, or none, with its rule.
        rules: those of all parts.
    """

    options: tuple[Option, ...]
    kept: tuple[str, ...]
    parted: tuple[tuple[str, Rule], ...]
    rules: frozenset[Rule]

    @property
    def refusing(self) -> list[Rule]:
        return [rule for _, rule in self.parted if rule.verdict == REFUSED]

    def row(self, model: str) -> dict[str, str]:
        """What `docs/data/recipes.csv` says of it."""
        changed = [
            f"`{flag}` to `{rule.becomes}`" if rule.becomes else f"no `{flag}`"
            for flag, rule in self.parted
        ]
        refused = [f"`{f}`" for f, rule in self.parted if rule.verdict == REFUSED]
        return {
            "kept": " ".join(self.kept),
            "changed": "; ".join(changed),
            "refused": "; ".join(refused),
            "on XPU": shlex.join(["vllm", "serve", model, *words(self.options)]),
        }


def generation(model: str) -> str:
    return "V4.1" if "V4.1" in model else "V4"


def words(given: Iterable[Option]) -> list[str]:
    """The options as arguments."""
    return [word for option in given for word in option.words()]


def options(arguments: Iterable[str]) -> list[Option]:
    """Those of `vllm serve MODEL ...`."""
    found: list[Option] = []
    for word in arguments:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            found.append(Option(name, value))
        else:
            found[-1] = Option(found[-1].name, word)
    return found


def converted(
    model: str,
    command: Sequence[Option],
    rules: Iterable[Rule],
    leave: Rule | None = None,
) -> Converted:
    """What becomes of the options, those excepted that the rule `leave` is for.

    Raises:
        LookupError: no rule is for a part of them.
    """
    rules = list(rules)

    def rule_of(flag: str) -> Rule:
        found = next((rule for rule in rules if rule.concerns(model, flag)), None)
        if found is None:
            raise LookupError(f"docs/data/recipe_flags.csv has no row for {flag}")
        return found

    made: list[Option] = []
    kept: list[str] = []
    parted: list[tuple[str, Rule]] = []
    known: set[Rule] = set()
    for option in command:
        parts = _parts(option)
        ruled = {flag: rule_of(flag) for flag in parts}
        known |= set(ruled.values())
        stays = {
            flag
            for flag, rule in ruled.items()
            if rule.verdict == KEPT or rule is leave
        }
        if option.name in WHOLE and len(stays) < len(parts):
            stays = set()
            ruled = {f: rule for f, rule in ruled.items() if rule.verdict != KEPT}
        if stays:
            made.append(_of(option, [parts[flag] for flag in parts if flag in stays]))
            kept.append(option.name)
        for flag, rule in ruled.items():
            if flag in stays:
                continue
            parted.append((flag, rule))
            if rule.becomes:
                value = flag.rpartition(" ")[2]
                made += options(shlex.split(rule.becomes.replace("*", value)))
    return Converted(tuple(made), tuple(kept), tuple(parted), frozenset(known))


def _parts(option: Option) -> dict[str, str]:
    """The option as rules name it, or each of its keys, and that key."""
    head, dot, tail = option.name.partition(".")
    name = head.replace("_", "-") + dot + tail
    keys = option.keys
    if keys is None:
        return {f"{name} {option.value}".rstrip(): ""}
    return {f"{name}.{key} {_text(value)}": key for key, value in keys.items()}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _of(option: Option, keys: Sequence[str]) -> Option:
    """The option with no other than these keys."""
    given = option.keys
    if given is None or list(given) == list(keys):
        return option
    return Option(option.name, json.dumps({key: given[key] for key in keys}))
