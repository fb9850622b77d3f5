# SPDX-License-Identifier: Apache-2.0
"""Finds whether a release needs a step: not if its test passes on a tree without it."""

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
from xpustack.steptest.material import Support
from xpustack.steptest.server import warm_server
from xpustack.steptest.step_test import StepTest


def passes_on(
    project: Project,
    cache: Cache,
    release: Release,
    step: Step,
    at: str | None,
    progress: Progress = silent,
) -> bool:
    """Whether all of a step's test passes on a tree of `release`.

    Args:
        at: the last step of the tree, `base` for none, None for the tip.

    Raises:
        CheckFailed: the tree cannot be built.
        StackError: as `trees`.
    """
    store = Store(cache)
    series = trees(store, project, release, progress=progress)
    by_label = {tree.label: tree for tree in series.trees}
    tree = series.tip if at is None else by_label[at]
    progress(f"testing {step.slug} on {tree.name}")
    with Runner().stop_on_error() as runner, closing(warm_server(runner)) as server:
        installed = build(
            runner, cache, store, tree, build_version(tree, len(series.steps))
        )
        test = StepTest.of(Support.of(project), release, step, None, installed)
        tested = test.run(server, cache)
    return not tested.problems
