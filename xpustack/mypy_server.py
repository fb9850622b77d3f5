# SPDX-License-Identifier: Apache-2.0
"""Keeps one build of mypy in memory and checks again only what changed.

This file is a program of its own, started by `warm_mypy` in the folder that mypy is
to see: it needs the standard library and mypy. Requests come on standard input and
answers leave on standard output, one line of JSON each. A request has

- `arguments`: what mypy is called with, the same flags in every request;
- `files`: those of the arguments that are files to check;
- `touched`: the files that were written or removed since the last request.

The answer has `messages`, those of all files ever asked for, or `refused` alone:
this program cannot tell what mypy would say, and ends.

The build is an ordinary one, not that of mypy's daemon, which infers some types in
another way (`--local-partial-types`). Later requests go through the daemon's own
updates of the changed parts.
"""

import contextlib
import gc
import io
import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mypy.build import BuildResult, build
from mypy.errors import CompileError
from mypy.find_sources import InvalidSourceList, create_source_list
from mypy.fscache import FileSystemCache
from mypy.main import process_options
from mypy.options import Options
from mypy.server.update import FineGrainedBuildManager

_FOLLOWING = frozenset({"normal", "silent"})
_SUFFIXES = (".py", ".pyi")
_COLLECT_AFTER = 200_000
"""What mypy's own command sets: fewer collections of garbage during a build."""


class Refused(Exception):
    """Only a new mypy can say what mypy would say."""


class WarmBuild:
    """A build of mypy that follows the files in the current folder."""

    def __init__(self, arguments: Sequence[str], files: Sequence[str]) -> None:
        """Build what `arguments` ask for.

        Raises:
            Refused: the options, or an error that ends the build, do not allow it.
        """
        self._fscache = FileSystemCache()
        sources, self._options = self._read(arguments)
        self._options.raise_exceptions = True
        self._options.cache_fine_grained = True
        try:
            result = build(sources, self._options, fscache=self._fscache)
        except CompileError as error:
            raise Refused("\n".join(error.messages)) from error
        self._messages = result.errors
        self._manager = _updatable(result, self._options)
        self._asked = set(files)

    def check(self, files: Sequence[str], touched: Iterable[str]) -> list[str]:
        """The messages of mypy, among them all that concern `files`.

        Raises:
            Refused: a file cannot be parsed, or has no place among the modules.
        """
        self._fscache.flush()
        present = {path for path in touched if os.path.isfile(path)}
        removed = set(touched) - present
        graph = {
            os.path.abspath(state.path): (state.id, state.path)
            for state in self._manager.graph.values()
            if state.path
        }
        # A module that nobody asked for so far was read for its types alone.
        wanted = [path for path in files if path in present or path not in self._asked]
        others = sorted(present - set(files))
        changed = self._modules(wanted)
        changed += [graph[at] for at in map(os.path.abspath, others) if at in graph]
        gone = [graph[at] for at in map(os.path.abspath, removed) if at in graph]
        new = [
            path
            for path in others
            if path.endswith(_SUFFIXES) and os.path.abspath(path) not in graph
        ]
        if new:
            self._update(self._modules(new), [], followed=True)
        if changed or gone:
            self._update(changed, gone)
        self._asked |= set(files)
        self._asked -= removed
        return self._messages

    def _update(
        self,
        changed: list[tuple[str, str]],
        gone: list[tuple[str, str]],
        followed: bool = False,
    ) -> None:
        self._messages = self._manager.update(changed, gone, followed)
        self._manager.flush_cache()
        if self._manager.blocking_error is not None:
            raise Refused("\n".join(self._messages))

    def _read(self, arguments: Sequence[str]) -> tuple[list[Any], Options]:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                sources, options = process_options(
                    list(arguments), fscache=self._fscache
                )
        except SystemExit:
            raise Refused(said.getvalue()) from None
        follows = {options.follow_imports} | {
            str(changes["follow_imports"])
            for changes in options.per_module_options.values()
            if "follow_imports" in changes
        }
        # Elsewhere it matters which files are asked for together.
        if not follows <= _FOLLOWING:
            raise Refused("imports are not followed")
        return sources, options

    def _modules(self, paths: Sequence[str]) -> list[tuple[str, str]]:
        if not paths:
            return []
        try:
            sources = create_source_list(paths, self._options, self._fscache)
        except InvalidSourceList as error:
            raise Refused(str(error)) from error
        return [(source.module, source.path) for source in sources if source.path]


def _updatable(result: BuildResult, options: Options) -> FineGrainedBuildManager:
    """Hand an ordinary build over to the machinery of mypy's daemon."""
    for name in result.manager.rechecked_modules:
        tree = result.graph[name].tree
        if tree is not None:
            # Its functions' bodies are gone: parse it again before it is updated.
            tree.is_cache_skeleton = True
    options.fine_grained_incremental = True
    manager = FineGrainedBuildManager(result)
    manager.flush_cache()
    gc.collect()
    gc.freeze()
    return manager


def _answers() -> Iterator[dict[str, Any]]:
    """The answer to each request; none follows one that was refused."""
    warm: WarmBuild | None = None
    for line in sys.stdin:
        request = json.loads(line)
        files = request["files"]
        try:
            if warm is None:
                warm = WarmBuild(request["arguments"], files)
                request["touched"] = ()
            yield {"messages": warm.check(files, request["touched"])}
        except Refused as error:
            yield {"refused": str(error)}
            return


def main() -> None:
    """Answer until standard input ends."""
    gc.set_threshold(_COLLECT_AFTER, 30, 30)
    # Where mypy, called by its name, would look for modules as well.
    sys.path.insert(0, sysconfig.get_path("scripts"))
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as output:
        os.dup2(2, 1)
        for answer in _answers():
            print(json.dumps(answer), file=output, flush=True)
    # Freeing gigabytes of syntax trees one by one takes seconds.
    os._exit(0)


if __name__ == "__main__":
    main()
