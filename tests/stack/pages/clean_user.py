# SPDX-License-Identifier: Apache-2.0
"""A user who has just cloned: an empty home, a cache of their own, few programs."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from stack.core.files import link_or_copy

ROOT = Path(__file__).parents[3]
PASSED_ON = ("PIP_", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "http_proxy", "https_proxy")
LIMIT = 1200.0


class CleanUser:
    """Types blocks in a checkout without anything that is not committed or new.

    Two downloads are spared: the archives of `sdists`, linked into the cache, and the
    packages of tox's environment, which is that of this process.
    """

    def __init__(self, folder: Path, sdists: Path) -> None:
        self.checkout, self.home = folder / "checkout", folder / "home"
        self.home.mkdir(parents=True)
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout
        for name in filter(None, names.decode().split("\0")):
            target = self.checkout / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_file():
                shutil.copy(ROOT / name, target)
        (self.checkout / ".tox").mkdir()
        (self.checkout / ".tox/shared").symlink_to(sys.prefix)
        self.cache = folder / "cache"
        if sdists.is_dir():
            shutil.copytree(sdists, self.cache / "sdists", copy_function=link_or_copy)
        self.python = folder / "venv"
        self._printed: dict[str, tuple[int, str]] = {}

    def type(self, block: str, door: bool = True) -> tuple[int, str]:
        """Exit status and output of a block, once.

        Args:
            door: whether `bin` is on the path, as a page says at its top.
        """
        if "pip install" in block and not self.python.is_dir():
            venv.create(self.python, with_pip=True, symlinks=True)
        if block not in self._printed:
            path = f"{self.python}/bin:/usr/bin:/bin"
            known = {n: v for n, v in os.environ.items() if n.startswith(PASSED_ON)}
            done = subprocess.run(
                ["sh", "-e", "-c", block],
                cwd=self.checkout,
                env={
                    **known,
                    "HOME": str(self.home),
                    "PATH": f"{self.checkout}/bin:{path}" if door else path,
                    "XPUSTACK_CACHE": str(self.cache),
                    "COLUMNS": "200",
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT,
            )
            self._printed[block] = done.returncode, done.stdout
        return self._printed[block]
