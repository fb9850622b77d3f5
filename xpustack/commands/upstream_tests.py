# SPDX-License-Identifier: Apache-2.0
"""`xpustack upstream-tests`: vLLM's own tests before and after a step, or all steps."""

import shlex
from contextlib import closing
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from stack.base import releases
from stack.base.store import Store
from stack.builds.build import backend_server, build, build_version
from stack.core.checkout import check_out
from stack.core.errors import UsageError, concerning
from stack.core.files import not_ours, vacant
from stack.core.process import Runner
from stack.pages.made import stamp
from stack.series.apply import trees
from stack.series.tree import BaseTree, StepTree
from stack.steptest.material import Support
from stack.terminal.console import (
    Count,
    Offline,
    Reply,
    working,
)


def upstream_tests(
    release: str,
    step: str | None = None,
    /,
    *,
    device: Literal["cpu", "emulated", "cuda"] = "emulated",
    to: Path | None = None,
    packages: Path | None = None,
    prepare: bool = False,
    read: bool = False,
    write: bool = False,
    jobs: Annotated[Count, Parameter(("--jobs", "-j"))] = 1,
    offline: Offline = False,
    answer: Reply,
) -> None:
    """Run the files of vLLM's tests that import or name what the steps change.

    Each runs before the steps and after them. A test whose outcome differs is listed,
    with exit code 1, as where no test ran.

    Args:
        release: Such as v0.33.0.
        step: One step; default: all of the series.
        device: The platform.
        to: The folder of the run; default: a temporary one.
        packages: A folder with what vLLM's tests import and is not installed; without
            it the command says how to make one.
        prepare: Only write the folder, for another machine.
        read: Only read what a run left in the folder.
        write: Write the rows to docs/data/upstream_tests.csv; those of other files
            stay.
        jobs: Files at a time.
    """
    import stack.upstream.vllm_tests as vllm_tests

    if prepare and read:
        raise UsageError(
            "--prepare comes before the run, --read after it: say one of them",
            hint=f"xpustack upstream-tests {release} --prepare --to DIR",
        )
    if (prepare or read) and to is None:
        word = "--prepare" if prepare else "--read"
        raise UsageError(
            "--prepare and --read need a folder",
            hint=f"xpustack upstream-tests {release} {word} --to DIR",
        )
    with working(offline) as (project, cache):
        store, runner = Store(cache), Runner()
        pinned = releases.load(project)[release]
        if not (prepare or read):
            packages = packages and packages.absolute()
            vllm_tests.require_packages(pinned, packages)
        series = trees(store, project, pinned, upto=step)
        after = series.tip
        before: BaseTree | StepTree = series.base
        if step is not None and isinstance(after, StepTree):
            before = after.parent
        with cache.scratch() as scratch:
            folder = (to or scratch / "run").absolute()
            files: list[str] = []
            if not read:
                if not vacant(folder):
                    raise not_ours(folder, pinned.name, "upstream-tests")
                check_out(cache, before.tree_id, scratch / "tree")
                modules = vllm_tests.touched_modules(store, before, after)
                files = vllm_tests.naming(scratch / "tree", modules)
                vllm_tests.require_named(files, modules, pinned, step)
                folder.mkdir(parents=True, exist_ok=True)
                with closing(backend_server(runner)) as server:
                    builds = [
                        build(server, store, tree, build_version(tree, -1))
                        for tree in (before, after)
                    ]
                vllm_tests.lay_out(folder, scratch / "tree", builds, files)
                cache.progress(f"{len(files)} files name {len(modules)} modules")
            support = Support.of(project)
            if not read:
                vllm_tests.run(
                    runner, support, pinned, folder, device, jobs, packages, prepare
                )
            if prepare:
                answer.data = {"directory": str(folder), "files": files}
                answer.say(f"next: D={folder} sh commands.sh where the platform is")
                return
            with concerning(pinned.name):
                found = vllm_tests.compared(folder, device)
    rows = vllm_tests.rows_of(found, pinned, step, device)
    nothing = vllm_tests.nothing_ran(found, pinned)
    if write and nothing is None:
        words = ["xpustack", "upstream-tests", pinned.name, *([step] if step else [])]
        words += ["--device", device]
        words += ["--to", "DIR", "--read"] if read else ["--packages", "DIR"]
        made = stamp(project, pinned.name, shlex.join([*words, "--write"]))
        vllm_tests.write_rows(
            project.root / vllm_tests.DATA, [{**row, **made} for row in rows]
        )
    answer.data = {"files": rows}
    shown = ("file", "passed_before", "passed_after", "changed", "not_run")
    answer.table(rows, shown)
    ran = sum(one.ran for one in found)
    changed = sum(bool(one.changed) for one in found)
    answer.say(
        f"{ran} files ran on {device}, {len(found) - ran} not run;"
        f" {changed} with other outcomes"
    )
    if nothing is not None:
        answer.fail(nothing)
    elif changed:
        answer.exit_code = 1
