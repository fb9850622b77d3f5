# SPDX-License-Identifier: Apache-2.0
"""A tox runner for environments that share one folder, because they need the same.

tox records in an environment's folder for which environment it was made, and makes
it anew for another one. This runner leaves the name out of that comparison; the
interpreter and the packages are still compared, so a change of either makes the
folder anew.
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
    """What tox remembers about a folder, without the name of its environment."""

    @contextmanager
    def compare(
        self, value: Any, section: str, sub_section: str | None = None
    ) -> Iterator[tuple[bool, Any]]:
        if section == ToxEnv.__name__:
            value = {key: value[key] for key in value if key != "name"}
        with super().compare(value, section, sub_section) as comparison:
            yield comparison


class SharedRunner(VirtualEnvRunner):
    """tox's usual runner, except that the folder may be that of another name."""

    @staticmethod
    def id() -> str:
        return "shared"

    @property
    def cache(self) -> Info:
        return NamelessInfo(self.env_dir)


@impl
def tox_register_tox_env(register: ToxEnvRegister) -> None:
    """tox's hook: offer the runner as `runner = shared`."""
    register.add_run_env(SharedRunner)
