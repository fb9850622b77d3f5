# SPDX-License-Identifier: Apache-2.0
"""The command line: which commands there are, and the options before them."""

import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

try:
    from cyclopts import App, CycloptsError, Group, Parameter
except ModuleNotFoundError as lacking:
    print(f"xpustack: {sys.executable} has no {lacking.name}", file=sys.stderr)
    print("  next: the same command of bin/xpustack", file=sys.stderr)
    sys.exit(5)

from stack.core.errors import UsageError, stack_error_of
from stack.core.history import version
from stack.terminal.console import EXIT_CODES, answering, complain
from xpustack.commands import (
    cache,
    check,
    device,
    export,
    pages,
    pins,
    plan,
    refresh,
    series,
    stamp,
    upstream_tests,
    wheels,
)

PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "For the deployer": (wheels.build, wheels.verify, plan.plan, device.device),
    "For the upstream contributor": (
        series.apply,
        series.save,
        series.rederive,
        check.check,
        export.export,
        upstream_tests.upstream_tests,
    ),
    "For the maintainer": (
        pages.status,
        stamp.stamp,
        pins.pin,
        refresh.refresh,
        pins.retire,
        pins.watch,
        pages.defects,
        pages.renew,
        pages.site,
        device.ingest,
    ),
}
app = App(
    name="xpustack",
    help="DeepSeek-V4 on Intel XPU: an ordered patch stack on pinned vLLM releases.",
    help_epilogue=EXIT_CODES,
    help_format="markdown",
    version=version,
    # No `--no-` beside a switch, and no default beside an option that has none.
    default_parameter=Parameter(negative=(), show_default=lambda value: value or None),
)
for place, (panel, commands) in enumerate(PANELS.items()):
    group = Group(panel, sort_key=place)
    for each in commands:
        app.command(each, group=group)
caches = App(name="cache", help="Show the cache, or clean it up.", group=group)
caches.command(cache.info)
caches.command(cache.gc)
app.command(caches)
# `run` prints help and version, too, so that it can refuse `--json` beside them.
app.meta.help_flags = app.meta.version_flags = ()


@app.meta.default
def run(
    *words: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    directory: Annotated[
        Path | None, Parameter("-C", help="Run as if started in this folder.")
    ] = None,
    as_json: Annotated[
        bool,
        Parameter(
            "--json",
            help="Print one JSON document instead:"
            " schema, command, ok, exit_code, data, errors.",
        ),
    ] = False,
) -> None:
    """Run the command that the words name, and print its answer."""
    name = " ".join(w for w in app.parse_commands(words)[0] if not w.startswith("-"))
    place = [] if directory is None else ["-C", str(directory)]
    with answering(name, as_json, [*place, *words]) as answer:
        called, bound, ignored = app.parse_args(
            words, exit_on_error=False, print_error=False
        )
        if as_json and "answer" not in ignored:
            raise UsageError(
                "--json goes with a command, and this prints help alone",
                hint=" ".join(filter(None, ("xpustack", name, "--help"))),
            )
        if directory is not None:
            if not directory.is_dir():
                raise UsageError(
                    "-C: there is no such folder",
                    path=directory,
                    hint="xpustack -C DIR status, with the folder of a checkout",
                )
            os.chdir(directory)
        given = {"answer": answer} if "answer" in ignored else {}
        called(*bound.args, **bound.kwargs, **given)


def call(words: Sequence[str]) -> None:
    """Run a command; exit unless all is well."""
    end = list(words).index("--") if "--" in words else len(words)
    if "--json" in words[:end]:
        # cyclopts takes what stands between a command and `--` for the command's own.
        before = (word for word in words[:end] if word != "--json")
        words = ["--json", *before, *words[end:]]
    try:
        app.meta(words, exit_on_error=False, print_error=False)
    except CycloptsError:
        # The options before the command are wrong.
        with answering("", as_json="--json" in words[:end]):
            raise


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main() -> None:
    """Run the command line. SIGTERM and SIGHUP interrupt it as Ctrl-C does."""
    signal.signal(signal.SIGTERM, _interrupt)
    # Under nohup the command goes on.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _interrupt)
    # Whoever started the command may have closed them.
    sys.stdout = sys.stdout or io.StringIO()
    sys.stderr = sys.stderr or io.StringIO()
    try:
        try:
            call(sys.argv[1:])
        finally:
            sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        problem = stack_error_of(error)
        complain(problem)
        sys.exit(problem.exit_code)


if __name__ == "__main__":
    main()
