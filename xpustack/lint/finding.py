# SPDX-License-Identifier: Apache-2.0
"""A linter's complaint, and how to recognize it in another tree."""

import re
from dataclasses import dataclass

_NUMBER = re.compile(r"\bline \d+")


@dataclass(frozen=True)
class LintFinding:
    """One complaint. `content` is the stripped source line: it identifies the
    complaint on another line number. `line` is 0 if it has no line."""

    tool: str
    path: str
    line: int
    text: str
    content: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        return (*self.kind, self.content)

    @property
    def kind(self) -> tuple[str, str, str]:
        return self.tool, self.path, _NUMBER.sub("line", self.text)

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}" if self.line else self.path
        return f"{place}: {self.tool}: {self.text}"
