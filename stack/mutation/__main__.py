# SPDX-License-Identifier: Apache-2.0
"""`python -m stack.mutation RELEASE STEP...`: plant faults; name those that survive."""

import argparse
import sys
from pathlib import Path

from stack.base import releases
from stack.checks.checker import Checker
from stack.core.cache import Cache
from stack.core.errors import StackError
from stack.core.project import Project
from stack.mutation.survivors import read_survivors
from stack.mutation.trial import Trial, planted
from stack.series.apply import trees
from stack.series.order import read_order, require_step
from stack.series.tree import StepTree
from stack.steptest.material import material_of
from stack.terminal.console import complain, using_cache

ALLOWED = "tests/steps/survivors.toml"


def main(words: list[str] | None = None) -> int:
    """Run the words of a command line; 1 if a fault survives that the list of survivors
    does not allow."""
    parser = argparse.ArgumentParser(
        prog="python -m stack.mutation", description=__doc__
    )
    parser.add_argument("release", help="such as v0.33.0")
    parser.add_argument("steps", nargs="+", metavar="STEP", help="a step's slug")
    parser.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="plant only faults whose printed line has this text; may be repeated",
    )
    parser.add_argument(
        "--list", action="store_true", help="print the faults; run nothing"
    )
    options = parser.parse_args(words)
    try:
        with using_cache() as cache:
            return _run(cache, options)
    except StackError as problem:
        complain(problem)
        return problem.exit_code


def _run(cache: Cache, options: argparse.Namespace) -> int:
    project = Project.find()
    release = releases.load(project)[options.release]
    allowed = read_survivors(project.root / ALLOWED)
    order = read_order(project, release.name)
    for slug in options.steps:
        require_step(order, slug, release.name)
    new = 0
    with Checker(project, cache) as checker:
        series = trees(checker.store, project, release)
        for tree in series.steps:
            if tree.slug not in options.steps:
                continue
            faults = [
                (fault, line)
                for fault in planted(checker.store, tree)
                for line in [str(fault)]
                if any(text in line for text in options.only or [""])
            ]
            print(f"{tree.slug}: {len(faults)} faults", flush=True)
            if options.list:
                print(*(line for _, line in faults), sep="\n")
                continue
            with cache.scratch() as work:
                trial = _trial(checker, work, tree, len(series.steps))
                trial.require_green()
                for fault, line in faults:
                    key = (tree.slug, *fault.key)
                    survives = trial.survives(fault)
                    if survives and key not in allowed:
                        new += 1
                        print(f"survives: {line}", flush=True)
                    elif survives:
                        print(f"allowed:  {line} ({allowed[key].reason})", flush=True)
                    else:
                        stale = ", take it off the list" if key in allowed else ""
                        print(f"seen:     {line}{stale}", flush=True)
                # Tests that saw faults ran first: that must not be why they were red.
                trial.require_green()
    print(f"{new} faults survive that {ALLOWED} does not allow")
    return int(new > 0)


def _trial(checker: Checker, work: Path, tree: StepTree, last: int) -> Trial:
    return Trial(
        checker.server,
        work,
        tree.step,
        checker.build(tree, last),
        material_of(checker.support, tree.step),
        tree.release.xpu_kernels.version,
    )


if __name__ == "__main__":
    sys.exit(main())
