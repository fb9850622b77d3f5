# SPDX-License-Identifier: Apache-2.0
"""How a start ended: by a refusal that says why, or by something else."""

import re
from dataclasses import dataclass

REFUSALS = ("NotImplementedError", "ValueError", "ValidationError")
"""What a start ends with that was refused on purpose."""
ERROR = re.compile(r"^(?:\[rank\d+\]: |E +)*((?:\w+\.)*\w*(?:Error|Exception)): ?(.*)$")
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\[{])")
EMULATION = "on the emulated XPU"
LONGEST = 240
"""How many characters of a message the table takes."""


@dataclass(frozen=True)
class Verdict:
    """One cell of the table; `why` has figures, or how the start ended."""

    kind: str
    why: str


def ended(trace: str) -> Verdict:
    """How a start ended, from the end of its output.

    Raises:
        AssertionError: there is no error in the output, or the emulation lacks what
            the release asked for, so that nothing is known.
    """
    found = None
    lines = trace.splitlines()
    for place, line in enumerate(lines):
        if match := ERROR.match(line):
            found = match[1].rpartition(".")[2], match[2], lines[place + 1 :]
    assert found, f"no error in:\n{trace}"
    kind, message, rest = found
    if kind == "ValidationError":
        message = _of_pydantic(message, rest)
    assert EMULATION not in message, f"nothing was compared: {message}"
    why = f"{kind}: {short(message or next(filter(str.strip, rest), ''))}"
    return Verdict("refuses" if kind in REFUSALS else "wrong", why)


def _of_pydantic(head: str, rest: list[str]) -> str:
    """What was wrong with which field. Pydantic's first line counts the errors; then
    come a field's name, unless the whole was refused, and behind blanks what is wrong,
    with the value in brackets."""
    field = ""
    for line in rest:
        if line.startswith("  "):
            message = line.strip().partition(" [type=")[0]
            message = message.removeprefix("Value error, ")
            return f"{field}: {message}" if field else message
        field = line.strip()
    return head


def short(message: str) -> str:
    """The first sentence, and of a long one the beginning: what follows may list all
    parameters of a model, in an order that differs from run to run."""
    first = SENTENCE.split(message.strip(), maxsplit=1)[0]
    return first if len(first) <= LONGEST else f"{first[: LONGEST - 1].rstrip()}…"
