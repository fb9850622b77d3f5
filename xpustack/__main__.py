# SPDX-License-Identifier: Apache-2.0
"""The command line: which commands there are, and the options before them."""

import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from xpustack.commands import (
    cache,
    check,
    defects,
    device,
    export,
    once,
    pins,
    plan,
    refresh,
    series,
    site,
    stamp,
    status,
    upstream_tests,
    wheels,
)
from xpustack.core.errors import UsageError
from xpustack.core.history import version
from xpustack.terminal.console import EXIT_CODES, Answer

DEPLOYER = "For the deployer"
CONTRIBUTOR = "For the upstream contributor"
MAINTAINER = "For the maintainer"


class Commands(TyperGroup):
    """The group of all commands; under `--json` it reports wrong usage as JSON, too."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command that `args` name (default: the process's own) and exit."""
        words = list(sys.argv[1:] if args is None else args)
        run = functools.partial(
            super().main,
            words,
            prog_name,
            complete_var,
            windows_expand_args=windows_expand_args,
            **extra,
        )
        if "--json" not in words or not standalone_mode:
            return run(standalone_mode=standalone_mode)
        try:
            code = run(standalone_mode=False)
        except typer.TyperException as error:
            answer = Answer(_command(self, words), as_json=True)
            answer.fail(UsageError(error.format_message(), hint="xpustack --help"))
            print(answer.envelope())
            code = answer.exit_code
        sys.exit(code)


def _command(group: TyperGroup, words: Sequence[str]) -> str:
    """The name of the command in `words`; empty if there is none."""
    for position, word in enumerate(words):
        if word in group.commands:
            inner = group.commands[word]
            if isinstance(inner, TyperGroup):
                return f"{word} {_command(inner, words[position + 1 :])}".rstrip()
            return word
    return ""


app = typer.Typer(
    cls=Commands,
    help="DeepSeek-V4 on Intel XPU: an ordered patch stack on pinned vLLM releases.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        print(version())
        raise typer.Exit


@app.callback()
def _global_options(
    directory: Annotated[
        Path | None,
        typer.Option(
            "-C",
            metavar="DIR",
            exists=True,
            file_okay=False,
            help="Run as if started in DIR.",
        ),
    ] = None,
    _: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version, with its commit in a checkout, and exit.",
        ),
    ] = False,
) -> None:
    if directory is not None:
        os.chdir(directory)


PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    DEPLOYER: (wheels.build, wheels.verify, plan.plan, device.device),
    CONTRIBUTOR: (
        series.apply,
        series.save,
        series.rederive,
        check.check,
        export.export,
        upstream_tests.upstream_tests,
    ),
    MAINTAINER: (
        status.status,
        stamp.stamp,
        pins.pin,
        refresh.refresh,
        pins.watch,
        defects.defects,
        site.site,
        device.ingest,
        once.once,
    ),
}
for panel, commands in PANELS.items():
    for command in commands:
        app.command(epilog=EXIT_CODES, rich_help_panel=panel)(command)

caches = typer.Typer(
    help="Show the cache, or clean it up.", epilog=EXIT_CODES, no_args_is_help=True
)
caches.command(epilog=EXIT_CODES)(cache.info)
caches.command(epilog=EXIT_CODES)(cache.gc)
app.add_typer(caches, name="cache", rich_help_panel=MAINTAINER)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main() -> None:
    """Run the command line. SIGTERM and SIGHUP interrupt it as Ctrl-C does."""
    signal.signal(signal.SIGTERM, _interrupt)
    # Under nohup the command goes on.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _interrupt)
    app()


if __name__ == "__main__":
    main()
