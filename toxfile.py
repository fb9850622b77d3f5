# SPDX-License-Identifier: Apache-2.0
"""A tox runner that lets environments with the same packages share one folder.

tox writes the environment's name into its folder, and makes the folder anew for another
name. This runner does not compare the name. It still compares the interpreter and the
packages: if one of them changes, tox makes the folder anew.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tox.plugin import impl
from tox.tox_env.api import ToxEnv
from tox.tox_env.info import Info
from tox.tox_env.python.virtual_env.runner import VirtualEnvRunner
from tox.tox_env.register import ToxEnvRegister


class NamelessInfo(Info):
    """tox's record of a folder, compared without the name of the environment."""

    @contextmanager
    def compare(
        self, value: Any, section: str, sub_section: str | None = None
    ) -> Iterator[tuple[bool, Any]]:
        if section == ToxEnv.__name__:
            value = {key: value[key] for key in value if key != "name"}
        with super().compare(value, section, sub_section) as comparison:
            yield comparison


class SharedRunner(VirtualEnvRunner):
    """tox's usual runner, which also accepts the folder of another environment."""

    @staticmethod
    def id() -> str:
        return "shared"

    @property
    def cache(self) -> Info:
        return NamelessInfo(self.env_dir)


@impl
def tox_register_tox_env(register: ToxEnvRegister) -> None:
    """tox's hook: register the runner for `runner = shared`."""
    register.add_run_env(SharedRunner)
