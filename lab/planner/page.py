# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.planner.page DOCUMENT ...`: keep what `plan --json` printed; with
`--again` instead of documents, plan each known machine anew.

Writes docs/data/plans.csv, a row for each split, and tables of docs/deploying.md and,
of experts in the host's memory, docs/speed.md.
Rows of other machines stay as they are.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lab.memory import DEVICES
from lab.planner.asked import short
from lab.planner.checkpoints import NAMED
from stack.core.markdown import table
from stack.core.project import Project
from stack.core.rows import read_rows
from stack.pages import record
from stack.pages.made import MADE, stamp

SECTION, PAGE, DATA = "plans", "docs/deploying.md", "docs/data/plans.csv"
FEW_CARDS, SPEED_PAGE = "few cards", "docs/speed.md"
MACHINE = (
    *("release", "model", "device", "count", "context", "concurrency"),
    *("host_memory", "link"),
)
"""What a plan is of."""
HEADS = (
    *("release", "devices", "split", "weights, GiB", "requests", "chunk"),
    *("host + pinned, GiB", "tokens/s, modelled", "limit, or why it does not start"),
    "planned",
)
GIB = 1 << 30
Row = dict[str, str]


def rows_of(data: Mapping[str, Any]) -> list[Row]:
    """A row for each split of a plan: those that start in their order, then others. The
    first has the command that serves it."""
    machine = {name: str(data[name]) for name in MACHINE}
    rows: list[Row] = []
    for one in data["choices"]:
        slow, fast = one["tokens_per_second"]
        alone_slow, alone_fast = one["tokens_per_second_of_one"]
        row = {
            "split": one["split"],
            "weights_gib": f"{one['weights_bytes'] / GIB:.1f}",
            "buffers_gib": f"{one['buffers_bytes'] / GIB:.1f}",
            "requests": one["requests"],
            "chunk": one["chunk"],
            "host_gib": f"{one['host_bytes'] / GIB:.0f}",
            "pinned_gib": f"{one['pinned_bytes'] / GIB:.0f}",
            "tokens_per_second_slow": f"{slow:.0f}",
            "tokens_per_second_fast": f"{fast:.0f}",
            "of_one_slow": f"{alone_slow:.0f}",
            "of_one_fast": f"{alone_fast:.0f}",
            "slots": one["slots"] or "",
            "first_token_seconds": _first_token(one["first_token_seconds"]),
            "limit": one["limit"],
            "serve": "" if rows else data["serve"],
        }
        rows.append(machine | {name: str(value) for name, value in row.items()})
    for split, reason in data["refused"].items():
        rows.append(machine | {"split": split, "refused": reason})
    return rows


def _first_token(found: Mapping[str, Iterable[float]]) -> str:
    """By the prompt's tokens, such as `8192: 0.5 to 1.2; 131072: 8 to 20`."""
    return "; ".join(
        f"{tokens}: " + " to ".join(f"{time:.2g}" for time in times)
        for tokens, times in found.items()
    )


def merged(known: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """`known` rows with the `new` ones in the place of those of the same machine."""
    found = _by_machine(known) | _by_machine(new)
    return [row for rows in found.values() for row in rows]


def shown(rows: Iterable[Row]) -> str:
    """The page's table: of each machine the first split that starts, or that lacks
    memory if none starts; those with experts in the host's memory are `few_cards`."""
    return table(
        HEADS,
        (
            _cells(row)
            for found in _by_machine(rows).values()
            if not found[0].get("host_memory")
            for row in (_starting(found) or _lacking(found))[:1]
        ),
    )


def few_cards(rows: Iterable[Row]) -> str:
    """The table of experts in the host's memory: of each machine the first split."""
    machines = [
        found for found in _by_machine(rows).values() if found[0].get("host_memory")
    ]
    heads = ("devices", "host, GiB", "slots", "tokens/s of one", "of all")
    return table(
        (*heads, "first token, s, by tokens"), (_few_cards(row) for row, *_ in machines)
    )


def _few_cards(row: Row) -> list[str]:
    begin = [f"{row['count']} {row['device']}", row["host_memory"]]
    if reason := row.get("refused"):
        return [*begin, reason.partition("; ")[0], "", "", ""]
    return [
        *begin,
        row["slots"],
        f"{row['of_one_slow']} to {row['of_one_fast']}",
        f"{row['tokens_per_second_slow']} to {row['tokens_per_second_fast']}",
        row["first_token_seconds"],
    ]


def _by_machine(rows: Iterable[Row]) -> dict[tuple[str, ...], list[Row]]:
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(_machine(row), []).append(row)
    return found


def _starting(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if not row.get("refused")]


def _lacking(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if " short on a device" in row["refused"]]


def _machine(row: Row) -> tuple[str, ...]:
    return tuple(row.get(name, "") for name in MACHINE)


def _cells(row: Row) -> list[str]:
    devices = f"{row['model']}: {row['count']} {row['device']}"
    day = row.get(MADE, "")
    if reason := row.get("refused"):
        return [row["release"], devices, row["split"], *[""] * 5, reason, day]
    speed = f"{row['tokens_per_second_slow']} to {row['tokens_per_second_fast']}"
    return [
        row["release"],
        devices,
        *(row[name] for name in ("split", "weights_gib", "requests", "chunk")),
        f"{row['host_gib']} + {row['pinned_gib']}",
        speed if row["tokens_per_second_slow"] else "",
        row["limit"],
        day,
    ]


def plans_of(rows: Iterable[Row]) -> Iterator[list[str]]:
    """The words of the command that plans each machine of the rows."""
    models = {one.label: name for name, one in NAMED.items()}
    devices = {one.name: short(one) for one in DEVICES}
    for machine in _by_machine(rows):
        release, model, device, count, context, concurrency, host, link = machine
        on_host = ["--host-memory", host, "--link", link] if host else []
        yield [
            *("plan", release),
            *("--model", models[model]),
            *("--device", devices[device]),
            *("--count", count),
            *("--context", context),
            *("--concurrency", concurrency),
            *on_host,
        ]


def again(project: Project, rows: Iterable[Row]) -> Iterator[tuple[str, str]]:
    """What `plan --json` prints of each machine now, after its command."""
    for words in plans_of(rows):
        command = (sys.executable, "-m", "xpustack", *words, "--json")
        # A plan that fits nowhere is one, too: its status tells, and it prints JSON.
        run = subprocess.run(
            command, cwd=project.root, stdout=subprocess.PIPE, text=True
        )
        yield f"xpustack {shlex.join(words)}", run.stdout


def _read(name: str) -> tuple[str, str]:
    try:
        return name, Path(name).read_text()
    except OSError as error:
        raise SystemExit(f"{name} cannot be read: {error}") from None


def main() -> None:
    """Write the rows of the documents, and the page's table of all."""
    project = Project.find()
    known = read_rows(project.root / DATA)
    given = sys.argv[1:]
    texts = again(project, known) if given == ["--again"] else map(_read, given)
    for name, text in texts:
        try:
            new = rows_of(json.loads(text)["data"])
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(
                f"{name} is not what `plan --json` printed: {error}"
            ) from None
        known = merged(known, [row | stamp(project, row["release"]) for row in new])
    record.write(project, DATA, known, PAGE, (SECTION, shown(known)))
    known = read_rows(project.root / DATA)
    record.write(project, DATA, known, SPEED_PAGE, (FEW_CARDS, few_cards(known)))


if __name__ == "__main__":
    main()
