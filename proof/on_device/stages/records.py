# SPDX-License-Identifier: Apache-2.0
"""The results of stages, and the report made of them: `report.json`."""

from pathlib import Path
from typing import Any, Literal

import msgspec

from stack.core.cache import atomic_file
from stack.core.errors import UsageError

SCHEMA = 1
"""Of `report.json`; raised when a reader of the last one could not read it."""
Kind = Literal["xpu", "cuda"]
Status = Literal["passed", "failed", "left out"]
STAGES = (
    *("doctor", "prove", "compare", "tune", "link", "serve", "model"),
    "report",
)
"""In the order that they run; each needs the doctor's facts alone."""


class Fact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One property of the machine, beside what the release pins; empty if unknown."""

    name: str
    found: str
    pinned: str = ""


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is wrong, or worth knowing, and what to do about it.

    After a fatal one no other stage can run on the device.
    """

    what: str
    fix: str = ""
    fatal: bool = False

    def __str__(self) -> str:
        return f"{self.what}; next: {self.fix}" if self.fix else self.what


class StageResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a stage ended.

    Attributes:
        key: digest of all that the result depends on.
        summary: one line for people.
        data: the stage's own figures, plain data.
    """

    stage: str
    status: Status
    key: str
    seconds: float
    summary: str
    findings: tuple[Finding, ...] = ()
    data: dict[str, Any] = {}


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All stages on one device."""

    schema: int
    tool: str
    time: str
    kind: Kind
    device: str
    release: str
    facts: tuple[Fact, ...]
    stages: tuple[StageResult, ...]

    def stage(self, name: str) -> StageResult | None:
        """A stage's result; None where it did not run."""
        return next((s for s in self.stages if s.stage == name), None)

    def fact(self, name: str) -> str:
        """What the doctor found; empty where it did not look."""
        return next((fact.found for fact in self.facts if fact.name == name), "")


def read_result(path: Path) -> StageResult | None:
    """A stored result; None where there is none, or one of another form."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=StageResult)
    except (OSError, msgspec.DecodeError):
        return None


def write(path: Path, value: StageResult | Report) -> None:
    """Write a result or a report in one step."""
    with atomic_file(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


def parse_report(content: bytes, name: str) -> Report:
    """A report from its JSON.

    Raises:
        UsageError: it is none, or one of a schema that this checkout does not read.
    """
    try:
        found = msgspec.json.decode(content)
        schema = found.get("schema") if isinstance(found, dict) else None
        if schema == SCHEMA:
            return msgspec.json.decode(content, type=Report)
    except msgspec.DecodeError as error:
        raise UsageError(f"not a device report: {error}", path=name) from None
    raise UsageError(
        f"a report of schema {schema}; this checkout reads schema {SCHEMA}",
        path=name,
        hint="make the report with this checkout: xpustack device",
    )
