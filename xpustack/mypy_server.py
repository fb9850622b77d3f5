# SPDX-License-Identifier: Apache-2.0
"""Keeps one build of mypy in memory and checks again only what changed.

This file is a program of its own, started by `warm_mypy` in the folder that mypy is
to see: it needs the standard library and mypy. Requests come on standard input and
answers leave on standard output, one line of JSON each. A request has

- `arguments`: what mypy is called with, the same flags in every request;
- `files`: those of the arguments that are files to check;
- `touched`: the files that were written or removed since the last request.

The answer has `messages`, those about the files, or `refused` alone:
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
_ROUNDS = 8
_COLLECT_AFTER = 200_000
"""What mypy's own command sets: fewer collections of garbage during a build."""


class Refused(Exception):
    """Only a new mypy can say what mypy would say."""


class WarmBuild:
    """A build of mypy that follows the files in the current folder."""

    def __init__(self, arguments: Sequence[str]) -> None:
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
        self._messages: dict[str, list[str]] = {}
        self._manager = _updatable(result, self._options)

    def check(self, files: Sequence[str], touched: Iterable[str]) -> list[str]:
        """The messages of mypy about `files`.

        Raises:
            Refused: a file cannot be parsed, or has no place among the modules.
        """
        self._fscache.flush()
        if touched:
            self._follow(set(touched))
            self._messages.clear()
        modules = self._modules(files)
        for _ in range(_ROUNDS):
            for module, path in modules:
                if path not in self._messages:
                    self._check_alone(module, path)
            if all(path in self._messages for path in files):
                return [text for path in files for text in self._messages[path]]
        raise Refused("the types do not settle")

    def _check_alone(self, module: str, path: str) -> None:
        """Check one whole file. If that changes what others may take from it, no
        message is valid any more."""
        messages = self._update([(module, path)], [])
        if self._manager.processed_targets == [module]:
            self._messages[path] = [
                text for text in messages if text.partition(":")[0] == path
            ]
        else:
            self._messages.clear()

    def _follow(self, touched: set[str]) -> None:
        """Bring the modules of the files, and all that depends on them, up to date."""
        graph = {
            os.path.abspath(state.path): (state.id, state.path)
            for state in self._manager.graph.values()
            if state.path
        }
        known = {path: graph.get(os.path.abspath(path)) for path in sorted(touched)}
        present = {path for path in touched if os.path.isfile(path)}
        new = [
            path
            for path, module in known.items()
            if module is None and path in present and path.endswith(_SUFFIXES)
        ]
        changed = [
            module for path, module in known.items() if module and path in present
        ]
        gone = [
            module for path, module in known.items() if module and path not in present
        ]
        self._update(self._modules(new) + changed, gone)

    def _update(
        self, changed: list[tuple[str, str]], gone: list[tuple[str, str]]
    ) -> list[str]:
        # What had errors is asked for file by file.
        self._manager.previous_targets_with_errors.clear()
        messages = self._manager.update(changed, gone)
        self._manager.flush_cache()
        if self._manager.blocking_error is not None:
            raise Refused("\n".join(messages))
        for tree in self._manager.manager.modules.values():
            # Whatever is updated is read again as a whole. mypy could update single
            # functions, and then sometimes forgets an attribute that they define.
            tree.is_cache_skeleton = True
        return messages

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
    for tree in result.manager.modules.values():
        # The bodies of its functions are gone: it is read again before an update.
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
                warm = WarmBuild(request["arguments"])
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
