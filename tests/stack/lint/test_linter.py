# SPDX-License-Identifier: Apache-2.0
"""Lint compares with the base, by the base's own configuration."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import pytest
import tiny_stack
from tiny_stack import BASE, HEADER, VALUE, TinyStack

from stack.base.store import Store
from stack.core import cache as cache_module
from stack.core import fingerprint
from stack.core.errors import EnvironmentProblem
from stack.core.process import Runner
from stack.lint import mypy_daemon
from stack.lint.hook_environment import make_hook_environment
from stack.lint.hook_runner import LintFinding
from stack.lint.linter import Linter, lint_key, new_findings
from stack.series.result import Result
from stack.series.tree import Tree

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
MYPY_SCRIPT = """\
import subprocess
import sys

version, *names = sys.argv[1:]
print("$ mypy")
code = 0
tests = [name for name in names if name.startswith("tests/")]
rest = [name for name in names if name.startswith("vllm/")]
for flags, group in ([], rest), (["--follow-imports", "skip"], tests):
    if group:
        command = ["mypy", "--python-version", version, *flags]
        code |= subprocess.run(command + group, check=False).returncode
sys.exit(code)
"""
# As in vLLM, a file without a header gets one from the hook.
SPDX_HOOK = """\
import sys

code = 0
for name in sys.argv[1:]:
    text = open(name).read()
    if "SPDX" not in text:
        print("without a header:\\n  " + name)
        open(name, "w").write("# SPDX\\n" + text)
        code = 1
sys.exit(code)
"""
HOOKS = f"""\
  - id: mypy-{VERSION}
    language: python
    entry: python tools/pre_commit/mypy.py "{VERSION}"
    types_or: [python, pyi]
    additional_dependencies: [mypy]
"""
USER = "vllm/user.py"
USES = HEADER + "from vllm.value import VALUE\n\nuse: int = VALUE\n"


def lint(stack: TinyStack, before: Tree, after: Tree) -> Result:
    """Lint once with mypy."""
    with closing(Linter(Runner(), Store(stack.cache))) as linter:
        return linter.lint("step", before, after, types=True)


@pytest.fixture(scope="module")
def linted(tmp_path_factory: pytest.TempPathFactory):
    """A function that adds a step to one stack and lints it."""
    stack = TinyStack(tmp_path_factory.mktemp("lint"))

    def add(slug: str, edits: dict[str, str]):
        stack.add(slug, edits)
        before, after = stack.trees()[-2:]
        return lint(stack, before, after)

    return add


def finding(line: int, content: str, text: str = "F401 unused") -> LintFinding:
    return LintFinding("ruff check", "vllm/a.py", line, text, content)


def test_a_finding_that_only_moved_is_not_new():
    assert new_findings([finding(3, "import os")], [finding(9, "import os")]) == ()


def test_a_finding_on_an_edited_line_takes_the_place_of_the_old_one():
    assert new_findings([finding(3, "f(a)")], [finding(3, "f(a, b)")]) == ()


def test_another_finding_of_the_same_kind_is_new():
    second = finding(4, "import sys")
    assert new_findings(
        [finding(3, "import os")], [finding(3, "import os"), second]
    ) == (second,)


def test_the_findings_of_the_base_do_not_count_and_new_ones_do(linted):
    moved = BASE[VALUE].replace("import os", "# moved\n\nimport os")
    clean = linted("clean", {VALUE: moved})
    assert (clean.status, clean.detail) == ("passed", ())
    tools = "ruff check, ruff format, typos, check-spdx-header"
    assert clean.summary == f"0 new, 1 of the base; {tools}"
    assert clean.notes == (
        "needs-more not run: a-package-that-nobody-has not installed",
    )
    bad = {
        VALUE: moved + "import sys\nx  =  1\n",
        "vllm/new.py": "# the sentense\nY = 1\n",
        "vllm/fine.py": HEADER + "Y = 1\n",
    }
    findings = linted("bad", bad).detail
    assert any("ruff check: E402" in text for text in findings)
    assert any("F401 `sys` imported" in text for text in findings)
    assert "vllm/value.py: ruff format: would be reformatted" in findings
    assert "vllm/new.py: check-spdx-header: refused" in findings
    typo = "sentense"
    assert f"vllm/new.py:1: typos: {typo} should be sentence" in findings
    assert not any("fine.py" in text for text in findings)
    assert "F401 `os`" not in "\n".join(findings)


def test_a_ruff_of_another_version_is_refused(linted, monkeypatch):
    monkeypatch.setattr(fingerprint, "installed_version", lambda name: "0.0.1")
    with pytest.raises(EnvironmentProblem, match=r"ruff==.* is needed, 0\.0\.1 is"):
        linted("other", {"vllm/other.py": HEADER})


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory):
    """A stack whose base asks for mypy, and whose steps break and repair types."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BASE, "tools/pre_commit/mypy.py", MYPY_SCRIPT)
        patch.setitem(BASE, "tools/pre_commit/check_spdx_header.py", SPDX_HOOK)
        configuration = tiny_stack.CONFIGURATION + HOOKS
        patch.setitem(BASE, ".pre-commit-config.yaml", configuration)
        options = '[tool.mypy]\nfollow_imports = "silent"\n'
        patch.setitem(BASE, "pyproject.toml", BASE["pyproject.toml"] + options)
        patch.setitem(BASE, USER, USES)
        stack = TinyStack(tmp_path_factory.mktemp("typed"))
    value = BASE[VALUE]
    steps: dict[str, dict[str, str]] = {
        "fine": {VALUE: value + "MORE: int = 2\n"},
        # The error is in a file that this step does not touch ...
        "elsewhere": {VALUE: value.replace("VALUE = 1", 'VALUE = "1"')},
        # ... and counts for the step that touches it, as one that was there.
        "touches-user": {USER: USES + "also = use\n"},
        "repairs": {VALUE: value, USER: USES + "also = use + 1\n"},
        "breaks": {USER: USES + "also: str = use\n", "vllm/bare.py": 'x: int = ""\n'},
        "goes-on": {"vllm/bare.py": 'x: int = ""\ny = x\n'},
    }
    for slug, edits in steps.items():
        stack.add(slug, edits)
    return stack


def outcome(done) -> tuple[object, ...]:
    return done.detail, done.summary, done.notes


def test_lints_that_follow_each_other_find_what_each_finds_alone(typed):
    trees = typed.trees()
    whole = (trees[0], trees[-1])
    # Types break in a file that a step does not touch, and in those of another.
    pairs = [(trees[1], trees[2]), (trees[4], trees[5])]
    alone = {pair: outcome(lint(typed, *pair)) for pair in [*pairs, whole]}
    with closing(Linter(Runner(), Store(typed.cache))) as linter:
        # Forward, the tip at once, then back: no order is assumed.
        for pair in [*pairs, whole, pairs[0]]:
            for daemon in (False, True):
                again = linter.lint("step", *pair, types=True, daemon=daemon)
                assert outcome(again) == alone[pair]


@pytest.mark.parametrize("daemon", [False, True])
def test_errors_of_types_count_where_their_file_is_touched(typed, daemon):
    trees = typed.trees()
    with closing(Linter(Runner(), Store(typed.cache))) as linter:
        pairs = itertools.pairwise(trees)
        lints = [
            linter.lint("step", *pair, types=True, daemon=daemon) for pair in pairs
        ]
    counts = [
        (sum(": mypy-" in new for new in done.detail), int(done.summary.split()[2]))
        for done in lints
    ]
    # One finding of the base's own is ruff's, of the unused import in `VALUE`.
    assert counts == [(0, 1), (0, 1), (0, 1), (0, 1), (2, 0), (0, 2)]
    bare = [new for new in lints[4].detail if new.startswith("vllm/bare.py:")]
    assert "vllm/bare.py: check-spdx-header: refused" in bare
    assert f"vllm/bare.py:1: mypy-{VERSION}: error: " in "\n".join(bare)


def test_types_are_checked_only_on_request(typed):
    breaks = typed.trees()[4:6]
    with closing(Linter(Runner(), Store(typed.cache))) as linter:
        without, with_ = (
            linter.lint("step", *breaks, types=types) for types in (False, True)
        )
    assert (without.typed, with_.typed) == (False, True)
    assert "mypy" not in without.summary
    of_types = set(with_.detail) - set(without.detail)
    assert of_types and all(f": mypy-{VERSION}: " in new for new in of_types)
    assert lint_key(*breaks, types=True) != lint_key(*breaks, types=False)


def test_mypy_sees_the_packages_of_its_hook_alone(typed, tmp_path):
    programs = make_hook_environment(tmp_path / "hook", ["mypy", "no-such-package"])
    script = "import mypy.main, sys; sys.exit(sys.prefix == sys.base_prefix)"
    for module, status in (("", 0), ("import msgspec; ", 1)):
        done = subprocess.run([programs / "python", "-c", module + script])
        assert done.returncode == status
    version = subprocess.run([programs / "mypy", "--version"], capture_output=True)
    assert version.returncode == 0, version.stderr


def test_a_hook_that_edits_a_file_edits_no_tree(typed):
    before, after = typed.trees()[-2:]
    with closing(Linter(Runner(), Store(typed.cache))) as linter:
        first = linter.lint("step", before, after, types=True)
        again = linter.lint("step", before, after, types=True)
        assert outcome(again) == outcome(first)
        assert not any("header" in new for new in first.detail)


def test_nothing_stays_behind_a_linter(typed, monkeypatch):
    monkeypatch.setattr(cache_module, "MEMORY", typed.root / "no such folder")
    with closing(Linter(Runner(), Store(typed.cache))) as linter:
        linter.lint("step", *typed.trees()[:2], types=True, daemon=True)
        assert list((typed.cache.root / "scratch").iterdir()) != []
    assert list((typed.cache.root / "scratch").iterdir()) == []


def test_the_daemon_stays_for_the_next_step_and_ends_with_the_linter(
    typed, monkeypatch
):
    def runs(pid: int) -> bool:
        # One that has ended and waits for its parent has no words.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return b"dmypy" in Path(f"/proc/{pid}/cmdline").read_bytes()
        return False

    pids = []
    # The path of a socket must be short.
    with tempfile.TemporaryDirectory(dir="/tmp") as memory:
        monkeypatch.setattr(cache_module, "MEMORY", Path(memory))
        with closing(Linter(Runner(), Store(typed.cache))) as linter:
            for pair in itertools.pairwise(typed.trees()[:3]):
                linter.lint("step", *pair, types=True, daemon=True)
                (status,) = Path(memory).rglob("dmypy.json")
                pids.append(json.loads(status.read_bytes())["pid"])
                assert runs(pids[-1])
    assert pids[0] == pids[1]
    limit = time.monotonic() + 10
    while runs(pids[0]):
        assert time.monotonic() < limit, "it still runs"
        time.sleep(0.01)


def test_without_room_for_its_socket_mypy_itself_checks(typed, monkeypatch):
    monkeypatch.setattr(cache_module, "MEMORY", typed.root / ("long" * 25))
    with closing(Linter(Runner(), Store(typed.cache))) as linter:
        (typed.root / ("long" * 25)).mkdir()
        breaks = typed.trees()[4:6]
        done = linter.lint("step", *breaks, types=True, daemon=True)
        assert list(typed.root.rglob("dmypy.json")) == []
    assert outcome(done) == outcome(lint(typed, *breaks))


def test_what_the_daemon_cannot_parse_is_no_pass(tmp_path):
    """After its first run it says no more that it looked at nothing else."""
    programs = make_hook_environment(tmp_path / "hook", ["mypy"])
    first = mypy_daemon.put_first(tmp_path / "daemon", programs)
    (tmp_path / "named.py").write_text('import other\nx: int = ""\n')
    found = []
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        for text in ("", "def (\n", ""):
            (tmp_path / "other.py").write_text(text)
            done = subprocess.run(
                [first / "mypy", "named.py"],
                cwd=tmp_path,
                env={"PATH": os.environ["PATH"], "TMPDIR": short},
                capture_output=True,
                text=True,
            )
            assert (first / "dmypy.json").is_file()
            found.append((done.returncode, done.stdout.partition(":")[0]))
        mypy_daemon.end_all(first)
    assert found == [(1, "named.py"), (2, "other.py"), (1, "named.py")]


@pytest.mark.parametrize("end", ["exit 1", "exit 2", "kill -9 $$"])
def test_a_daemon_without_a_verdict_leaves_it_to_mypy(tmp_path, end):
    programs = make_hook_environment(tmp_path / "hook", ["mypy"])
    says = "#!/bin/sh\necho Daemon has died\n"
    (programs / "dmypy").write_text(says + end + "\n")
    first = mypy_daemon.put_first(tmp_path / "daemon", programs)
    (first / "dmypy.json").write_text("{}")
    (tmp_path / "bare.py").write_text('x: int = ""\n')
    done = subprocess.run(
        [first / "mypy", "bare.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1 and "bare.py:1: error: " in done.stdout, done
