# SPDX-License-Identifier: Apache-2.0
"""Which device the emulated XPU is, and what differs from one device to another.

`architectures.toml` has the answers and where each was read.
"""

import os
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ARCHITECTURE = "EMULATED_XPU_ARCHITECTURE"
"""The environment variable that names the device's architecture."""
DEFAULT = "xe2"
DATA = Path(__file__).with_name("architectures.toml")


@dataclass(frozen=True)
class Limit:
    """An op that some chips lack.

    Attributes:
        chips: those that have it.
        says: what the device raises on another one; empty if it raises nothing.
        wrong: what the device then computes instead.
    """

    op: str
    chips: frozenset[str]
    says: str
    wrong: str

    def error(self, chip: str) -> Exception:
        """What a call ends with on a chip that lacks the op."""
        if self.says:
            return RuntimeError(self.says)
        return NotImplementedError(
            f"{self.op} on the emulated XPU, which is a {chip}: {self.wrong}"
        )


def architecture() -> str:
    """The device's architecture: what the job states, or `DEFAULT`.

    Raises:
        LookupError: none of that name is known.
    """
    name = os.environ.get(ARCHITECTURE) or DEFAULT
    known: dict[str, str] = data()["architecture"]
    if name not in known:
        raise LookupError(
            f"{ARCHITECTURE}={name} is unknown; known: {', '.join(sorted(known))}"
        )
    return name


def chip() -> str:
    """SYCL's name of the device, such as `bmg_g21`."""
    name: str = data()["architecture"][architecture()]
    return name


def answer(query: str) -> bool:
    """What the device answers to an op that asks for its kind, such as
    `_xpu_C::is_xe2_arch`."""
    (chips,) = (q["chips"] for q in data()["query"] if q["op"] == query)
    return chip() in chips


@cache
def limit(op: str, version: str) -> Limit | None:
    """The chips that have an op of a version, or None if all have it.

    Args:
        op: its qualified name.
        version: a version of vllm-xpu-kernels. One that is listed nowhere has what the
            newest row of the op says, which is last read from wheels.
    """
    rows = [row for row in data()["op"] if row["op"] == op]
    named = [row for row in rows if version in row["source"]]
    for row in named or rows[:1]:
        return Limit(
            op, frozenset(row["chips"]), row.get("says", ""), row.get("wrong", "")
        )
    return None


@cache
def data() -> dict[str, Any]:
    """`architectures.toml`."""
    return tomllib.loads(DATA.read_text("utf-8"))
