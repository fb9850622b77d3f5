# SPDX-License-Identifier: Apache-2.0
"""Whether a release does without a step: its test passes on a tree without it."""

from contextlib import closing

from xpustack.base.releases import Release
from xpustack.base.store import Store
from xpustack.builds.build import build, build_version
from xpustack.core.cache import Cache
from xpustack.core.process import Runner
from xpustack.core.progress import Progress, silent
from xpustack.core.project import Project
from xpustack.series.apply import trees
from xpustack.series.patch import Step
from xpustack.steptest.server import Server
from xpustack.steptest.step_test import StepTest, Support


def passes_on(
    project: Project,
    cache: Cache,
    release: Release,
    step: Step,
    at: str | None,
    progress: Progress = silent,
) -> bool:
    """Run a step's test on a tree of `release` and say whether all of it passes.

    Args:
        at: the last step of the tree, `base` for none, None for the tip.

    Raises:
        CheckFailed: the tree cannot be built.
        StackError: as `trees`.
    """
    store = Store(cache)
    made = trees(store, project, release, progress=progress)
    by_label = {tree.label: tree for tree in made.trees}
    tree = made.tip if at is None else by_label[at]
    progress(f"testing {step.slug} on {tree.name}")
    with Runner().stop_on_error() as runner, closing(Server(runner)) as server:
        built = build(runner, cache, store, tree, build_version(tree, len(made.steps)))
        test = StepTest.of(Support.of(project), release, step, None, built)
        done = test.run(server, cache)
    return not done.problems
