# SPDX-License-Identifier: Apache-2.0
"""What a stored plan depends on, and what becomes of a start that failed."""

import json
from pathlib import Path

import pytest

from lab.planner import asked, trial
from lab.planner.checkpoints import NAMED
from stack.base.releases import load
from stack.core.errors import EnvironmentProblem, InternalError
from stack.core.files import closure
from stack.core.process import TIMED_OUT, Completed, Runner
from stack.core.project import Project

ROOT = Path(__file__).parents[3]
PROJECT = Project(ROOT)


def test_the_key_covers_all_that_a_start_imports() -> None:
    needed = closure([*trial.PROGRAMS.glob("*.py"), ROOT / "proof/e2e/absent.py"], ROOT)
    listed = {path.resolve() for path in trial._programs(PROJECT).values()}
    missing = [name for name, path in needed.items() if path.resolve() not in listed]
    assert sorted(missing) == []
    names = {path.relative_to(ROOT).as_posix() for path in listed}
    assert names >= {
        "lab/planner/programs/forks.py",
        "lab/planner/trial.py",
        "standins/emulated_xpu/worker.py",
        "lab/memory.py",
        "proof/e2e/checkpoints/dspark.py",
        "proof/e2e/pictures.py",
    }
    assert "lab/planner/choices.py" not in names


@pytest.mark.parametrize(
    ("answer", "code", "error", "says"),
    [
        ({"fault": "Traceback\nRuntimeError: rank 16"}, 0, InternalError, "rank 16"),
        (None, 1, InternalError, "exit status 1"),
        (None, 0, InternalError, "exit status 0"),
        (None, TIMED_OUT, EnvironmentProblem, "more than 30 minutes"),
    ],
)
def test_a_failure_of_the_planner_says_nothing_of_the_release(
    answer: dict[str, str] | None,
    code: int,
    error: type[Exception],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ended(self: Runner, command: list[str], **_: object) -> Completed:
        if answer is not None:
            Path(command[-1]).write_text(json.dumps(answer))
        return Completed(code, "", "", 1.0)

    monkeypatch.setattr(Runner, "run", ended)
    release = load(PROJECT)["v0.33.0"]
    with pytest.raises(error, match=says):
        trial._start(PROJECT, release, Runner(), tmp_path, tmp_path, {})


def test_more_devices_than_any_split_start_nothing() -> None:
    """Neither a build nor a search over a million devices."""
    wanted = asked.Asked(NAMED["flash"], asked.device("b60"), 10**12, 4096, 1)
    release = load(PROJECT)["v0.33.0"]
    assert trial.run(PROJECT, None, release, wanted) == trial.Trial()  # type: ignore[arg-type]
