# SPDX-License-Identifier: Apache-2.0
"""A git clone of a small upstream: three releases, fifty commits between them, and the
refs that a forge has."""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from fake_stack import git
from tiny_stack import BASE, HEADER, TinyStack

TABLE = "vllm/table.py"
OLD_NAME, NEW_NAME = "vllm/old_name.py", "vllm/new_name.py"
GENERATED = {"PKG-INFO": "Version: 1\n"}
"""What an archive holds and a repository does not."""
LINES = 40
Files = dict[str, str]


def table(files: Files, number: int, text: str) -> Files:
    """The files with another value of one line of the table."""
    lines = files[TABLE].splitlines()
    place = next(k for k, line in enumerate(lines) if line.startswith(f"L{number} "))
    lines[place] = f"L{number} = {text}"
    return {**files, TABLE: "\n".join(lines) + "\n"}


def first_release() -> Files:
    lines = "".join(f"L{number} = {number}\n" for number in range(1, LINES + 1))
    return {**BASE, TABLE: HEADER + lines, OLD_NAME: HEADER + "NAME = 1\n" * 9}


def between(files: Files) -> Iterator[tuple[str, Files]]:
    """Twenty-five commits: lines move, files are renamed, lines near those of the steps
    change."""
    count = sum(name.startswith("vllm/part_") for name in files)
    for number in range(count, count + 8):
        files = {**files, f"vllm/part_{number}.py": HEADER + f"PART = {number}\n"}
        yield f"Add part {number}", files
        moved = files[TABLE].replace(HEADER, f"{HEADER}# Moved by part {number}.\n", 1)
        files = {**files, TABLE: moved}
        yield f"Move the table for part {number}", files
        text = files.pop(f"vllm/part_{number}.py")
        files = {**files, f"vllm/part_{number}_{number}.py": text}
        yield f"Rename part {number}", files
    files = table(files, 39, f"39  # after {count} parts")
    yield "Say how many parts there are", files


def on_main(files: Files) -> Iterator[tuple[str, Files]]:
    """What upstream does to the lines that the steps touch."""
    files = table(files, 3, "3 + 0")
    yield "Write line 3 another way", files
    files = table(files, 12, "121")
    yield "Give line 12 another value", files
    files = table(files, 20, "200")
    yield "Fix line 20", files
    files = table(files, 25, "5 * 50")
    yield "Fix line 25 another way", files
    files = {**files, NEW_NAME: files[OLD_NAME]}
    del files[OLD_NAME]
    yield "Rename the old name", files


STEPS = {
    "clean": {33: "330"},
    "merges": {5: "50"},
    "there": {20: "200"},
    "needs": {6: "60"},
    "needs-by-test": {36: "L33 + 1"},
    "renamed": {},
    "conflicts": {12: "120"},
    "there-by-test": {25: "250"},
}
"""The lines that each step changes, by their number."""


def upstream(place: Path, stack: TinyStack) -> Path:
    """A repository whose tags v1.0 and v2.0 are the pins of `stack`, and whose main
    goes on to an archive that is not pinned."""
    place.mkdir()
    git(place, "init", "-q", "-b", "main")
    git(place, "config", "uploadpack.allowFilter", "true")
    git(place, "config", "uploadpack.allowAnySHA1InWant", "true")
    first = first_release()
    _commit_all(place, [("vLLM 1.0", first)])
    _release(place, stack, "1.0", first)
    second = _commit_all(place, between(first))
    _release(place, stack, "2.0", second)
    third = _commit_all(place, between(second))
    _commit_all(place, on_main(third))
    git(place, "update-ref", "refs/pull/7/head", "main~3")
    return place


def _release(place: Path, stack: TinyStack, version: str, files: Files) -> None:
    git(place, "tag", "-a", "-m", version, f"v{version}")
    git(place, "branch", f"releases/v{version}")
    stack.publish(version, {**files, **GENERATED})


def _commit_all(place: Path, commits: Iterable[tuple[str, Files]]) -> Files:
    """Commit each of the trees; returns the last."""
    last: Files = {}
    for subject, last in commits:
        shutil.rmtree(place / "vllm", ignore_errors=True)
        for path, text in last.items():
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_text(text)
        git(place, "add", "--all", "--force")
        git(place, "commit", "-q", "-m", subject)
    return last


class ClonedStack(TinyStack):
    """A stack with a step of each kind on v2.0, and a clone of its upstream."""

    def __init__(self, root: Path) -> None:
        self.unpublished = True
        super().__init__(root)
        self.unpublished = False
        self.upstream = upstream(root / "upstream", self)
        for slug, lines in STEPS.items():
            self._add(slug, lines)

    def publish(self, version: str, edits: dict[str, str]) -> None:
        if not self.unpublished:
            super().publish(version, edits)

    def clone(self, name: str = "clone", *options: str) -> Path:
        """A clone that a contributor has, of the upstream as a forge serves it."""
        url = f"file://{self.upstream}"
        git(self.root, "clone", "-q", *options, url, name)
        return self.root / name

    def _add(self, slug: str, lines: dict[int, str]) -> None:
        module = f"tests/steps/test_{slug.replace('-', '_')}.py"
        work = self.apply("look", "v2.0")
        files = {TABLE: (work / TABLE).read_text()}
        shutil.rmtree(work)
        for number, text in lines.items():
            files = table(files, number, text)
        if slug == "renamed":
            files = {OLD_NAME: HEADER + "NAME = 1\n" * 8 + "NAME = 2\n"}
            self.write(module, HEADER + RENAMED)
            failure = "assert 1 == 2"
        else:
            ((number, text),) = lines.items()
            value = 331 if slug == "needs-by-test" else int(text)
            self.write(module, HEADER + PROVES.format(number=number, value=value))
            failure = f"assert {number} == {value}"
        self.add(slug, files, "v2.0", module, failure)


PROVES = """\
from vllm import table


def test_line():
    assert table.L{number} == {value}
"""
RENAMED = """\
import importlib.util
from importlib import import_module


def test_name():
    found = importlib.util.find_spec("vllm.old_name")
    name = import_module("vllm.old_name" if found else "vllm.new_name")
    assert name.NAME == 2
"""
