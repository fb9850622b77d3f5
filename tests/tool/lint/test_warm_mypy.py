# SPDX-License-Identifier: Apache-2.0
"""The mypy that stays says what a new one says, tree after tree."""

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from xpustack.core.cache import Cache
from xpustack.core.process import Runner, Stopped, clean_environment, program
from xpustack.lint import warm_mypy
from xpustack.lint.warm_mypy import WarmMypy

FLAGS = ("--python-version", f"{sys.version_info.major}.{sys.version_info.minor}")
CONFIGURATION = """\
[tool.mypy]
ignore_missing_imports = true
check_untyped_defs = true
follow_imports = "silent"
"""
# Several variants of each file; None is a tree without it. In some of them the error
# is in the file, in others it is in the files that use it, around an import cycle.
FILES: dict[str, tuple[str | None, ...]] = {
    "vllm/__init__.py": ("", "from vllm.config import Config\n"),
    "vllm/config.py": (
        "from dataclasses import dataclass\n@dataclass\nclass Config:\n    rank: int\n",
        "from dataclasses import dataclass\n@dataclass\nclass Config:\n    rank: str\n",
        "class Config:\n    def __init__(self) -> None:\n        self.rank = 1\n",
        "class Config:\n    rank: int = 'one'\n",
    ),
    "vllm/platform.py": (
        "current = None\ndef use(name):\n    global current\n    current = name + 1\n",
        "current = None\ndef use() -> None:\n    global current\n    current = 3\n",
        "from typing import Final\ncurrent: Final = 1\ndef use() -> None: ...\n",
        None,
    ),
    "vllm/layer.py": (
        "from vllm import model\nclass Layer:\n    def forward(self, x: int) -> int:\n"
        "        return x\n    def owner(self):\n        return model.Model([self])\n",
        "from vllm import model\nclass Layer:\n    def forward(self, x: int, y: str)"
        " -> int:\n        return x\n    def owner(self) -> 'model.Model':\n"
        "        return model.Model(1)\n",
        "class Layer:\n    forward = None\n    def owner(self) -> int:\n"
        "        return 'no'\n",
    ),
    "vllm/model.py": (
        "from vllm.layer import Layer\nclass Model(Layer):\n"
        "    def __init__(self, layers: list[Layer]) -> None:\n"
        "        self.layers = layers\n    def forward(self, x: int) -> int:\n"
        "        return sum(layer.forward(x) for layer in self.layers)\n",
        "from vllm.layer import Layer\nclass Model(Layer):\n    layers = []\n"
        "    def __init__(self, count: int) -> None:\n"
        "        self.layers.append(count)\n",
    ),
    "vllm/run.py": (
        "from vllm.config import Config\nfrom vllm.model import Model\n"
        "from vllm import platform\n"
        "def main(config: Config) -> int:\n    model = Model([])\n"
        "    platform.use()\n    print(model.owner().layers, platform.current + 1)\n"
        "    return model.forward(config.rank)\n",
        "from vllm.kernels.decode import decode\ndef main() -> int:\n"
        "    return decode('x')\n",
    ),
    "vllm/kernels/__init__.py": ("", None),
    "vllm/kernels/decode.py": (
        "def decode(x: int) -> str:\n    return str(x)\n",
        "def decode(x: str) -> int:\n    return len(x)\n",
        None,
    ),
}


class Checkout:
    """A folder with one variant of each file, and what mypy says of it."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "tree"
        self.now: dict[str, str | None] = {}
        self.folder.mkdir(parents=True)
        (self.folder / "pyproject.toml").write_text(CONFIGURATION)
        self.runner = Runner()
        self.cache = Cache(root / "cache")
        self.work = root / "work"
        self.env = clean_environment(TMPDIR=str(root))
        self.warm = WarmMypy(
            self.runner, self.cache, self.folder, self.work, self.env, 120.0
        )
        self.warm.later = frozenset(FILES)

    def move(self, variants: dict[str, str | None]) -> None:
        touched = {path for path, text in variants.items() if self._write(path, text)}
        self.warm.moved(touched)

    def _write(self, path: str, text: str | None) -> bool:
        if path in self.now and self.now[path] == text:
            return False
        self.now[path] = text
        place = self.folder / path
        if text is None:
            place.unlink(missing_ok=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        return True

    def present(self, paths: list[str]) -> list[str]:
        return sorted(path for path in paths if self.now.get(path) is not None)

    def messages(self, files: list[str]) -> list[str]:
        return errors(self.warm.check(FLAGS, files).stdout)

    def fresh_messages(self, files: list[str]) -> list[str]:
        done = subprocess.run(
            [*program("mypy"), "--cache-dir=/dev/null", *FLAGS, *files],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
        )
        assert done.returncode in (0, 1), done.stdout + done.stderr
        return errors(done.stdout)


def errors(output: str) -> list[str]:
    return sorted(line for line in output.splitlines() if ": error:" in line)


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that has mypy's entries of the installed packages."""
    checkout = Checkout(tmp_path_factory.mktemp("sites"))
    checkout.move(first())
    checkout.messages(["vllm/run.py"])
    return checkout.cache.root


@pytest.fixture
def checkout(tmp_path: Path, sites: Path) -> Iterator[Checkout]:
    checkout = Checkout(tmp_path)
    shutil.copytree(sites, checkout.cache.root)
    yield checkout
    checkout.warm.close()


def first() -> dict[str, str | None]:
    return {path: variants[0] for path, variants in FILES.items()}


def test_it_says_what_a_new_one_says_over_a_walk_and_back(checkout: Checkout):
    seed = int(
        os.environ.get("XPUSTACK_MYPY_SEED") or random.SystemRandom().getrandbits(32)
    )
    chance = random.Random(seed)
    trees = [first()]
    for _ in range(5):
        # A step that touches some files; the rest stay as they are.
        edits = {
            path: chance.choice(FILES[path]) for path in chance.sample([*FILES], 3)
        }
        trees.append({**trees[-1], **edits})
    wrong = 0
    for tree in [*trees, *trees[-2::-2]]:
        checkout.move(tree)
        files = checkout.present(chance.sample([*FILES], 4))
        expected = checkout.fresh_messages(files)
        assert checkout.messages(files) == expected, f"XPUSTACK_MYPY_SEED={seed}"
        wrong += len(expected)
    assert checkout.warm.notes == []


def test_an_error_in_a_caller_that_nobody_touched_is_reported_when_asked_for(
    checkout: Checkout,
):
    checkout.move(first())
    assert checkout.messages(["vllm/config.py"]) == []
    rank = FILES["vllm/config.py"][1]
    checkout.move({"vllm/config.py": rank})
    assert checkout.messages(["vllm/config.py"]) == []
    messages = checkout.messages(["vllm/config.py", "vllm/run.py"])
    assert [line for line in messages if 'incompatible type "str"' in line]
    assert messages == checkout.fresh_messages(["vllm/config.py", "vllm/run.py"])


def test_a_module_that_appears_and_goes_again_changes_what_its_users_say(
    checkout: Checkout,
):
    user = {"vllm/run.py": FILES["vllm/run.py"][1], "vllm/kernels/decode.py": None}
    checkout.move({**first(), **user})
    files = ["vllm/run.py"]
    assert checkout.messages(files) == checkout.fresh_messages(files) == []
    checkout.move({"vllm/kernels/decode.py": FILES["vllm/kernels/decode.py"][0]})
    messages = checkout.messages(files)
    assert messages == checkout.fresh_messages(files)
    assert len(messages) == 2
    checkout.move({"vllm/kernels/decode.py": None})
    assert checkout.messages(files) == []


def test_a_script_that_nobody_imports_is_read_when_asked_for(checkout: Checkout):
    checkout.move(first())
    files = ["vllm/run.py"]
    messages = checkout.messages(files)
    server = server_of(checkout)
    checkout.move({"setup.py": "def (\n"})
    assert checkout.messages(files) == messages
    checkout.move({"setup.py": "from vllm import config\nrank: int = 'no'\n"})
    assert checkout.messages(["setup.py"]) == checkout.fresh_messages(["setup.py"])
    assert len(checkout.messages(["setup.py"])) == 1
    assert server_of(checkout) == server


def test_a_module_at_the_top_that_was_missed_is_read(checkout: Checkout):
    checkout.move({**first(), "vllm/run.py": "from top import rank\nx: int = rank\n"})
    files = ["vllm/run.py"]
    assert checkout.messages(files) == []
    checkout.move({"top.py": "rank = 'no'\n"})
    messages = checkout.messages(files)
    assert messages == checkout.fresh_messages(files)
    assert len(messages) == 1


def test_types_are_inferred_as_by_mypy_and_not_as_by_its_daemon(checkout: Checkout):
    used = "items = []\ndef use() -> None:\n    items.append(3)\n"
    checkout.move({**first(), "vllm/platform.py": used})
    files = ["vllm/platform.py"]
    # The daemon would ask for an annotation of `items`.
    assert checkout.messages(files) == checkout.fresh_messages(files) == []


def test_a_change_reaches_a_file_through_others_that_nobody_asks_about(
    checkout: Checkout,
):
    chain = {
        "vllm/platform.py": "def rank() -> int: ...\n",
        "vllm/config.py": "from vllm.platform import rank\nclass Config:\n"
        "    def __init__(self) -> None:\n        self.rank = rank()\n",
        "vllm/run.py": "from vllm.config import Config\nrank: int = Config().rank\n",
    }
    checkout.move({**first(), **chain})
    assert checkout.messages(["vllm/run.py"]) == []
    checkout.move({"vllm/platform.py": "def rank() -> str: ...\n"})
    messages = checkout.messages(["vllm/run.py"])
    assert messages == checkout.fresh_messages(["vllm/run.py"])
    assert len(messages) == 1


def test_a_file_that_cannot_be_parsed_is_left_to_a_new_one(checkout: Checkout):
    checkout.move(first())
    assert checkout.messages(["vllm/config.py"]) == []
    checkout.move({"vllm/config.py": "class Config(:\n"})
    done = checkout.warm.check(FLAGS, ["vllm/config.py"])
    assert done.returncode == 2
    assert "vllm/config.py:1: error: " in done.stdout
    checkout.move({"vllm/config.py": FILES["vllm/config.py"][3]})
    assert (
        checkout.messages(["vllm/config.py"])
        == checkout.fresh_messages(["vllm/config.py"])
        != []
    )
    assert checkout.warm.notes == []


def test_where_imports_are_not_followed_a_new_one_is_asked(checkout: Checkout):
    checkout.move(first())
    flags = (*FLAGS, "--follow-imports", "skip")
    alone = checkout.warm.check(flags, ["vllm/run.py"])
    assert alone.returncode == 0
    checkout.move({"vllm/config.py": FILES["vllm/config.py"][1]})
    both = checkout.warm.check(flags, ["vllm/config.py", "vllm/model.py"])
    assert (both.returncode, both.stderr) == (0, "")


def test_other_options_are_read_when_they_change(checkout: Checkout):
    checkout.move(first())
    untyped = "def broken():\n    return 1 + 'x'\n"
    checkout.move({"vllm/config.py": untyped})
    assert len(checkout.messages(["vllm/config.py"])) == 1
    checkout.move({"pyproject.toml": "[tool.mypy]\nfollow_imports = 'silent'\n"})
    assert checkout.messages(["vllm/config.py"]) == []


def server_of(checkout: Checkout) -> int:
    (process,) = checkout.warm._servers.values()
    return process._child.pid


def test_one_that_dies_is_started_again_once(checkout: Checkout):
    checkout.move(first())
    checkout.messages(["vllm/run.py"])
    os.kill(server_of(checkout), signal.SIGKILL)
    checkout.move({"vllm/config.py": FILES["vllm/config.py"][3]})
    messages = checkout.messages(["vllm/config.py", "vllm/run.py"])
    assert messages == checkout.fresh_messages(["vllm/config.py", "vllm/run.py"]) != []
    assert len(checkout.warm.notes) == 1


def test_one_that_dies_again_is_replaced_by_a_new_mypy(
    checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('no memory')\n")
    monkeypatch.setattr(warm_mypy, "SERVER", broken)
    checkout.move({**first(), "vllm/config.py": FILES["vllm/config.py"][3]})
    assert (
        checkout.messages(["vllm/config.py"])
        == checkout.fresh_messages(["vllm/config.py"])
        != []
    )
    assert checkout.warm.notes == ["mypy's server ended: no memory"] * 2


def test_it_ends_with_the_runner(checkout: Checkout):
    checkout.move(first())
    checkout.messages(["vllm/run.py"])
    server = server_of(checkout)
    checkout.runner.stop()
    with pytest.raises(Stopped):
        checkout.messages(["vllm/run.py"])
    checkout.warm.close()
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)


def test_what_is_known_of_installed_packages_serves_the_next_release(
    checkout: Checkout,
):
    checkout.move(first())
    files = ["vllm/run.py", "vllm/config.py"]
    assert list((checkout.cache.root / "mypy").iterdir()) != []
    shutil.rmtree(checkout.cache.root / "mypy")
    messages = checkout.messages(files)
    # A new mypy gave these, and left its cache.
    assert checkout.warm._servers == {}
    (kept,) = (checkout.cache.root / "mypy").iterdir()
    content = kept.read_bytes()
    assert b"builtins.meta" in content
    assert b"vllm/run.meta" not in content
    assert checkout.messages(files) == messages == checkout.fresh_messages(files)
    assert len(checkout.warm._servers) == 1
    assert kept.read_bytes() == content
