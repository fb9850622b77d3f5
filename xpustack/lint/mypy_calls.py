# SPDX-License-Identifier: Apache-2.0
"""Record how a base's script calls mypy, with a `mypy` that only logs its arguments."""

from collections.abc import Mapping
from pathlib import Path

_CALLS = "XPUSTACK_MYPY_CALLS"
_PROGRAM = f"""\
#!/bin/sh
{{ for argument; do printf '%s\\0' "$argument"; done; printf '\\0'; }} >>"${_CALLS}"
"""


class MypyCallRecorder:
    """Records the calls of `mypy` by a script that runs in `env`; no call checks
    anything. `work` is a folder for its files."""

    def __init__(self, work: Path) -> None:
        self._folder = work / "recorder"
        self._calls = work / "calls"
        self._calls.unlink(missing_ok=True)
        program = self._folder / "mypy"
        if not program.is_file():
            self._folder.mkdir(parents=True, exist_ok=True)
            program.write_text(_PROGRAM, encoding="ascii")
            program.chmod(0o755)

    def env(self, outer: Mapping[str, str]) -> dict[str, str]:
        """The variables that a script's environment has besides those of `outer`."""
        return {"PATH": f"{self._folder}:{outer['PATH']}", _CALLS: str(self._calls)}

    def calls(self) -> list[list[str]]:
        """The arguments of each call so far. None is ever empty."""
        try:
            text = self._calls.read_bytes().decode("utf-8", "surrogateescape")
        except FileNotFoundError:
            return []
        return [call.split("\0") for call in text.split("\0\0")[:-1]]
