# SPDX-License-Identifier: Apache-2.0
"""The command line: words in, tables or JSON out, exit codes."""

import json
import signal
import sys
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Console

from xpustack import checks, pin, releases, report, save, static, status
from xpustack.cache import Cache
from xpustack.checkout import apply_to
from xpustack.commands import build, defects, export, refresh, verify, watch
from xpustack.console import (
    EXIT_CODES,
    AsJson,
    Offline,
    print_rows,
    reporting_errors,
    say_all,
    showing_progress,
)
from xpustack.errors import CheckFailed, StackError, UsageError
from xpustack.project import Project
from xpustack.results import Kind, Report
from xpustack.store import Store
from xpustack.tree import grow

app = typer.Typer(
    help="DeepSeek-V4 on Intel XPU: an ordered patch stack on pinned vLLM releases.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Only(StrEnum):
    """The kinds of check that can be asked for alone."""

    build = "build"
    lint = "lint"
    test = "test"


_KINDS: dict[Only, Kind] = {
    Only.build: "build",
    Only.lint: "lint",
    Only.test: "test",
}


@app.command(epilog=EXIT_CODES)
def apply(
    release: Annotated[str | None, typer.Argument(help="Such as v0.22.1.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every release.")] = False,
    upto: Annotated[
        str | None, typer.Option(help="The last step's slug, or base.")
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(help="The repository to make; with --all one folder in it each."),
    ] = None,
    offline: Offline = False,
    as_json: AsJson = False,
) -> None:
    """Apply a series: as trees in the cache, and with --to as a git repository."""
    with reporting_errors(as_json), showing_progress() as progress:
        project, cache = Project.find(), Cache.default()
        pinned = releases.load(project)
        if (release is None) is not all_:
            raise UsageError(
                "name one RELEASE, or say --all", hint="xpustack apply --help"
            )
        chosen = list(pinned) if release is None else [pinned[release]]
        applied: list[dict[str, Any]] = []
        problems: list[StackError] = []
        for one in chosen:
            try:
                if to is None:
                    made, problem = grow(
                        Store(cache),
                        project,
                        one,
                        offline=offline,
                        progress=progress,
                        upto=upto,
                    )
                    problems += [problem] if problem else []
                else:
                    made = apply_to(
                        project,
                        cache,
                        one,
                        to / one.name if all_ else to,
                        upto,
                        offline=offline,
                        progress=progress,
                    )
            except StackError as error:
                problems.append(error)
                continue
            applied += [
                {
                    "release": one.name,
                    "step": tree.step.slug if tree.step else "base",
                    "commit": tree.commit,
                    "tree": tree.tree_id,
                }
                for tree in made
            ]
    columns = ("release", "step", "commit", "tree")
    errors = [problem.to_json() for problem in problems]
    print_rows(as_json, {"trees": applied, "errors": errors}, applied, columns)
    if problems:
        if not as_json:
            say_all(problems)
        raise typer.Exit(problems[0].exit_code)


@app.command("save", epilog=EXIT_CODES)
def save_(
    directory: Annotated[Path, typer.Argument(help="What `apply --to` made.")],
    dry_run: Annotated[
        bool, typer.Option(help="List stale files, write none.")
    ] = False,
    drop: Annotated[
        list[str] | None,
        typer.Option(help="A step that is to leave the series; repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write patches, overlay and trailers back from the commits in DIRECTORY.

    A dry run that finds stale files ends with exit code 1."""
    with reporting_errors(as_json), showing_progress() as progress:
        stale = save.save(
            Project.find(),
            Cache.default(),
            directory,
            dry_run,
            drop=tuple(drop or ()),
            progress=progress,
        )
    lines = [f"{one.kind} {one.path}" for one in stale]
    if as_json:
        print(json.dumps({"stale": lines, "written": not dry_run}))
    else:
        print("\n".join(lines) or "nothing to save")
    if stale and dry_run:
        raise typer.Exit(CheckFailed.exit_code)


@app.command(epilog=EXIT_CODES)
def check(
    release: Annotated[str | None, typer.Argument(help="Such as v0.22.1.")] = None,
    step: Annotated[str | None, typer.Argument(help="A step's slug.")] = None,
    jobs: Annotated[int, typer.Option("-j", "--jobs", min=1)] = 2,
    only: Annotated[Only | None, typer.Option(help="One kind of check.")] = None,
    only_static: Annotated[
        bool, typer.Option("--static", help="Judge the files alone: no checkout.")
    ] = False,
    tip: Annotated[
        bool, typer.Option("--tip", help="Check whole series, not each step.")
    ] = False,
    ends: Annotated[
        bool,
        typer.Option(
            "--ends",
            help="The newest release step by step, the oldest whole, no others.",
        ),
    ] = False,
    offline: Offline = False,
    as_json: AsJson = False,
) -> None:
    """Rebuild, lint and test every step of every release, or what is named."""
    if only_static:
        _check_static(release, as_json)
        return
    with reporting_errors(as_json), showing_progress() as progress:
        project = Project.find()
        pinned = releases.load(project)
        chosen = list(pinned) if release is None else [pinned[release]]
        if ends:
            del chosen[1:-1]
        names = [one.name for one in chosen]
        done = checks.run(
            project,
            Cache.default(),
            chosen,
            step=step,
            only=_KINDS[only] if only else None,
            tips=names if tip else names[:-1] if ends else (),
            jobs=jobs,
            offline=offline,
            progress=progress,
        )
    _show(done, as_json)
    if done.failed:
        raise typer.Exit(CheckFailed.exit_code)


def _show(done: Report, as_json: bool) -> None:
    if as_json:
        print(json.dumps(done.to_json(), indent=1))
    else:
        report.show(done, Console(width=None if sys.stdout.isatty() else 100))


def _check_static(release: str | None, as_json: bool) -> None:
    with reporting_errors(as_json):
        project = Project.find()
        name = None if release is None else releases.load(project)[release].name
        found = [
            finding
            for finding in static.check_static(project)
            if name is None or finding.release in (None, name)
        ]
        errors = [finding for finding in found if not finding.warning]
    if as_json:
        print(json.dumps([msgspec.to_builtins(finding) for finding in found]))
    else:
        print("\n".join([*map(str, found), f"static: {len(errors)} errors"]))
    if errors:
        raise typer.Exit(4)


@app.command("status", epilog=EXIT_CODES)
def status_(
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option(help="As a Markdown table.")] = False,
    write_readme: Annotated[
        bool, typer.Option(help="Refresh README.md's section and docs/steps.md.")
    ] = False,
    check_readme: Annotated[
        bool, typer.Option(help="Fail if one of them is stale.")
    ] = False,
) -> None:
    """Show release by step: lines changed, upstream's status, cached checks of
    the step as it is now, and days since it was committed first.

    The README's table and --markdown leave out what depends on machine and day."""
    with reporting_errors(as_json):
        project = Project.find()
        pinned = releases.load(project)
        if check_readme:
            status.require_fresh(project, pinned)
            return
        if write_readme:
            status.write_readme(project, pinned)
            return
        found = (
            status.entries(project, pinned)
            if markdown
            else status.judged(project, Cache.default(), pinned)
        )
    if as_json:
        print(json.dumps([msgspec.to_builtins(entry) for entry in found], indent=1))
    elif markdown:
        print(status.markdown(found, pinned.names), end="")
    else:
        rows = [
            dict(zip(("step", *pinned.names), _row(slug, row), strict=True))
            for slug, row in status.matrix(found, pinned.names)
        ]
        print_rows(False, None, rows, ("step", *pinned.names))


def _row(slug: str, row: list[status.Entry | None]) -> list[str]:
    return [slug, *(status.long_cell(entry) if entry else "-" for entry in row)]


@app.command("pin", epilog=EXIT_CODES)
def pin_(
    version: Annotated[str, typer.Argument(help="Such as 0.24.0.")],
    as_json: AsJson = False,
) -> None:
    """Add a release to releases.toml: found, downloaded, hashed, and read."""
    with reporting_errors(as_json), showing_progress() as progress:
        added = pin.pin(Project.find(), Cache.default(), version, progress)
    if as_json:
        print(json.dumps(msgspec.to_builtins(added)))
    else:
        print(f"pinned {added.name}: {added.sdist} sha256 {added.sha256}")


app.command("defects", epilog=EXIT_CODES)(defects.defects)
app.command("export", epilog=EXIT_CODES)(export.export)
app.command("refresh", epilog=EXIT_CODES)(refresh.refresh)
app.command("watch", epilog=EXIT_CODES)(watch.watch)
app.command("build", epilog=EXIT_CODES)(build.build)
app.command("verify", epilog=EXIT_CODES)(verify.verify)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main() -> None:
    """Run the command line; termination and a terminal's end are an interrupt."""
    signal.signal(signal.SIGTERM, _interrupt)
    # Who started it under nohup wants it to go on.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _interrupt)
    app()
