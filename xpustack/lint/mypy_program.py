# SPDX-License-Identifier: Apache-2.0
"""Keeps one build of mypy in memory and checks again only what changed.

This file is a program of its own. `warm_mypy` starts it in the folder that mypy
checks. It needs the standard library and mypy. Requests come on standard input and
answers leave on standard output, one line of JSON each. A request has

- `arguments`: mypy's own; only those of the first request count;
- `files`: the files to check;
- `touched`: the files that were written or removed since the last request.

The answer has `messages`, mypy's messages about the files. Or it has only `refused`:
this program cannot give mypy's answer, and ends.

The build is an ordinary one, not the daemon's, which infers some types differently
(`--local-partial-types`). Later requests go through the daemon's own
updates of the changed parts.
"""

import contextlib
import gc
import io
import json
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeAlias

from mypy.build import build
from mypy.errors import CompileError
from mypy.find_sources import InvalidSourceList, create_source_list
from mypy.fscache import FileSystemCache
from mypy.main import process_options
from mypy.options import Options
from mypy.server.astdiff import snapshot_symbol_table
from mypy.server.update import (
    BlockedUpdate,
    FineGrainedBuildManager,
    calculate_active_triggers,
    ensure_deps_loaded,
    ensure_trees_loaded,
    find_targets_recursive,
    get_module_to_path_map,
    update_module_isolated,
)
from mypy.typestate import type_state

_FOLLOWING = frozenset({"normal", "silent"})
_SUFFIXES = (".py", ".pyi")
_ROUNDS = 10
_COLLECT_AFTER = 200_000
"""What mypy's own command sets: fewer collections of garbage during a build."""


_Module: TypeAlias = tuple[str, str]
"""Its name and its path."""


class Refused(Exception):
    """Only a new mypy process can give mypy's answer."""


class WarmBuild:
    """A build of mypy that follows the files in the current folder."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Build as `arguments` say.

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
        self._manager, self._graph = result.manager, result.graph
        self._messages: dict[str, list[str]] = {}
        for tree in self._manager.modules.values():
            tree.is_cache_skeleton = True
        # From here on as in the daemon: nothing is read from or written to the cache.
        self._options.fine_grained_incremental = True
        self._dependencies = FineGrainedBuildManager(result).deps
        self._manager.ast_cache.clear()
        gc.collect()
        gc.freeze()

    def check(self, files: Sequence[str], touched: Collection[str]) -> list[str]:
        """The messages of mypy about `files`.

        Raises:
            Refused: a file cannot be parsed, or has no place among the modules.
        """
        self._fscache.flush()
        if touched:
            self._follow(touched)
            self._messages.clear()
        modules = self._modules(files)
        for _ in range(_ROUNDS):
            # Check each module once more after all that it depends on. That gives
            # the messages of a check of the whole file.
            for module in modules:
                if module[1] not in self._messages:
                    self._settle([module])
            if all(path in self._messages for path in files):
                return [text for path in files for text in self._messages[path]]
        raise Refused("the types do not settle")

    def _follow(self, touched: Collection[str]) -> None:
        """Bring the modules of the files, and all that depends on them, up to date."""
        modules_by_path = {
            os.path.abspath(state.path): (state.id, state.path)
            for state in self._graph.values()
            if state.path
        }
        modules, new_files = [], []
        for path in sorted(touched):
            module = modules_by_path.get(os.path.abspath(path))
            if module is not None:
                modules.append(module)
            elif path.endswith(_SUFFIXES) and os.path.isfile(path):
                new_files.append(path)
        self._settle([*self._importable(new_files), *modules])

    def _importable(self, paths: Sequence[str]) -> list[_Module]:
        """The modules of new files, without scripts such as `setup.py` that no module
        imports: what these import takes minutes, module by module."""
        missed = {name for state in self._graph.values() for name in state.suppressed}
        return [
            module
            for module in self._modules(paths)
            if "." in module[0] or module[0] in missed
        ]

    def _settle(self, modules: Sequence[_Module]) -> None:
        """Read modules again, then the modules that depend on their changes, until
        nothing changes."""
        queue = list(dict.fromkeys(modules))
        times = Counter[str]()
        while queue:
            module = queue.pop(0)
            name, imported, dependent = self._read_again(*module)
            times[name] += 1
            if times[name] > _ROUNDS:
                raise Refused(f"the types of {name} do not settle")
            if imported or dependent:
                self._messages.clear()
            if module in imported:
                imported = [*(other for other in imported if other != module), module]
            # Dependent modules come last: they may depend on further changes.
            queue = list(dict.fromkeys([*imported, *queue, *dependent]))

    def _read_again(
        self, name: str, path: str
    ) -> tuple[str, list[_Module], list[_Module]]:
        """Check one whole module from its source: this one, or a new one that it
        imports. Return its name, the modules to read next (this one among them), and
        the modules that depend on its changes.

        mypy's daemon does the same for a changed file. But of dependent files it
        checks single functions, and sometimes forgets an attribute that such a
        function defines. This program reads dependent files as a whole.
        """
        manager, graph = self._manager, self._graph
        manager.find_module_cache.clear()
        manager.ast_cache.clear()
        ensure_deps_loaded(name, self._dependencies, graph)
        ensure_trees_loaded(manager, graph, [name])
        paths = get_module_to_path_map(graph)
        snapshots = {}
        if name in manager.modules:
            table = manager.modules[name].names
            snapshots[name] = snapshot_symbol_table(name, table)
        manager.errors.reset()
        result = update_module_isolated(name, path, manager, paths, graph, False, False)
        if isinstance(result, BlockedUpdate):
            raise Refused("\n".join(result.messages))
        messages = manager.errors.new_messages()
        triggered = calculate_active_triggers(
            manager, snapshots, {result.module: result.tree}
        )
        if result.module in graph:
            graph[result.module].update_fine_grained_deps(self._dependencies)
            graph[result.module].free_state()
        if result.tree is not None:
            result.tree.is_cache_skeleton = True
        if triggered:
            type_state.reset_all_subtype_caches()
        _, dependent, _ = find_targets_recursive(
            manager, graph, triggered, self._dependencies, {result.module}
        )
        self._messages[result.path] = [
            text for text in messages if text.partition(":")[0] == result.path
        ]
        dependents = [(module, graph[module].xpath) for module in sorted(dependent)]
        return result.module, result.remaining, dependents

    def _read(self, arguments: Sequence[str]) -> tuple[list[Any], Options]:
        output = io.StringIO()
        try:
            with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
                sources, options = process_options(
                    list(arguments), fscache=self._fscache
                )
        except SystemExit:
            raise Refused(output.getvalue()) from None
        follows = {options.follow_imports} | {
            str(changes["follow_imports"])
            for changes in options.per_module_options.values()
            if "follow_imports" in changes
        }
        # With other values, the answer depends on which files are checked together.
        if not follows <= _FOLLOWING:
            raise Refused("imports are not followed")
        return sources, options

    def _modules(self, paths: Sequence[str]) -> list[_Module]:
        if not paths:
            return []
        try:
            sources = create_source_list(paths, self._options, self._fscache)
        except InvalidSourceList as error:
            raise Refused(str(error)) from error
        return [(source.module, source.path) for source in sources if source.path]


def _answers() -> Iterator[dict[str, Any]]:
    """The answer to each request. The first refusal is the last answer."""
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
    # The `mypy` command looks for modules there too.
    sys.path.insert(0, sysconfig.get_path("scripts"))
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as output:
        os.dup2(2, 1)
        for answer in _answers():
            print(json.dumps(answer), file=output, flush=True)
    # Freeing gigabytes of syntax trees one by one takes seconds.
    os._exit(0)


if __name__ == "__main__":
    main()
