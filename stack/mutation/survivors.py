# SPDX-License-Identifier: Apache-2.0
"""The faults at which a step's test may stay green, with reasons, from a TOML file."""

import tomllib
from pathlib import Path

import msgspec

from stack.core.errors import SeriesError

Key = tuple[str, str, str, str]
"""The slug, the path, the line's code, and the fault."""


class Survivor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault that may survive: the step's slug, the module's path in vLLM, the line
    and the fault as a run prints them, and why no test of the step sees it."""

    step: str
    path: str
    code: str
    fault: str
    reason: str

    @property
    def key(self) -> Key:
        return self.step, self.path, self.code, self.fault


class _File(msgspec.Struct, forbid_unknown_fields=True):
    survivor: list[Survivor]


def read_survivors(path: Path) -> dict[Key, Survivor]:
    """The survivors that the file allows, by their keys.

    Raises:
        SeriesError: the file is malformed, names a fault twice, or gives no reason.
    """
    try:
        file = msgspec.convert(tomllib.loads(path.read_text("utf-8")), _File)
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise SeriesError(str(error), path=path) from error
    found: dict[Key, Survivor] = {}
    for survivor in file.survivor:
        problem = "is there twice" if survivor.key in found else "has no reason"
        if survivor.key in found or not survivor.reason.strip():
            raise SeriesError(
                f"the survivor `{survivor.fault}` {problem}",
                step=survivor.step,
                path=path,
            )
        found[survivor.key] = survivor
    return found
