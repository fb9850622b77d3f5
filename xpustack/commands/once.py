# SPDX-License-Identifier: Apache-2.0
"""`xpustack once`: run a command unless it passed on this very checkout."""

import os
from typing import Annotated

import msgspec
from cyclopts import Parameter

from xpustack.checks import once as checks
from xpustack.core.errors import UsageError
from xpustack.core.process import Runner
from xpustack.core.project import Project
from xpustack.release.inputs import machine
from xpustack.terminal.console import Reply, using_cache


def once(
    *words: Annotated[str, Parameter(allow_leading_hyphen=True)],
    index: bool = False,
    answer: Reply,
) -> None:
    """Run a command unless it passed on this very checkout.

    `tox` runs its tests so: with the same files, packages, programs and variables a
    second run says when the first one passed. XPUSTACK_AGAIN=1 runs it again. Exits as
    the command does.

    Args:
        words: The command's words, after `--`.
        index: Whether the command asks git which files it tracks.
    """
    if not words:
        raise UsageError("no command is named", hint="xpustack once --help")
    with using_cache() as cache:
        root = Project.find().root
        programs = machine(Runner())
        key = checks.key(root, words, programs, index)
        success = checks.stored(cache, key) if key else None
        if success is not None and not os.environ.get(checks.AGAIN):
            answer.say(
                f"passed on these very files: {success.summary or 'no fault'},"
                f" in {success.seconds:.0f} s, {success.ended}",
                f"{checks.AGAIN}=1 runs it again",
            )
            return
        # The document of --json has stdout for itself.
        output = 2 if answer.as_json else None
        answer.exit_code, success = checks.run(root, words, output)
        if answer.exit_code or key is None:
            return
        if checks.key(root, words, programs, index) == key:
            cache.results_put(key, msgspec.to_builtins(success))
