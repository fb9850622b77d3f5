# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.aot.costs.step_page`: model the speed of DeepSeek-V4 on common splits.

Prints tokens per second and writes, with `--docs PAGE`, that page's generated section
and three files of rows beside it.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lab.aot.calls import upstream
from lab.aot.compiler import compile as compiler
from lab.aot.compiler.ocloc import OclocError, find
from lab.aot.costs import sharing, step
from lab.aot.costs.model import devices
from lab.aot.costs.step import Part, Range, Split
from lab.aot.costs.step_kernels import Load, Modelled, load
from lab.memory import FLASH, PRO, Model, Shapes
from lab.memory_v41 import FLASH_V41
from stack.core.cache import Cache
from stack.core.errors import StackError
from stack.core.markdown import table, with_section
from stack.core.project import Project
from stack.core.rows import csv_text
from stack.pages.made import stamped

SECTION, SHARING_SECTION = "step", "sharing"
PARTS, SPEED = "data/step_model.csv", "data/speed_model.csv"
SHARING = "data/sharing_model.csv"
REQUESTS, CONTEXTS, CHUNK = (1, 16, 64), (16_384, 131_072), 2_048
WHOLE = ", on every rank"
"""How parts end whose weights every rank reads whole."""
SHARDED = ("shared expert", "projections", "small weights", "head")
"""Parts whose weights the ranks share, beside the experts."""
SIDES = {"patched": "ours", "untouched": "upstream"}


@dataclass(frozen=True)
class Bought:
    """Devices that people buy for a model.

    Attributes:
        name: as a shop says it.
        model: that they serve.
        split: of its ranks.
    """

    name: str
    model: Shapes
    split: Split


def bought() -> list[Bought]:
    """What the page models. Whether the cache has room for the requests is not checked:
    docs/data/plans.csv says where it has not."""
    known = {device.name: device for device in devices()}
    b60, b70 = known["Arc Pro B60"], known["Arc Pro B70"]
    stack = known["Max 1550, one stack"]
    return [
        Bought("16 B60", FLASH, Split(b60, 8, 2)),
        Bought("8 B70", FLASH, Split(b70, 8)),
        Bought("4 Max 1550", FLASH, Split(stack, 8)),
        Bought("8 Max 1550", PRO, Split(stack, 16)),
        Bought("16 B70", FLASH_V41, Split(b70, 8, 2)),
        Bought("4 Max 1550", FLASH_V41, Split(stack, 8)),
    ]


@dataclass(frozen=True)
class Case:
    """A step of a split: a decode step for so many requests of the server, or, with 0,
    a prefill chunk."""

    of: Bought
    requests: int
    context: int

    @property
    def together(self) -> int:
        """Tokens of one step on one rank."""
        if not self.requests:
            return CHUNK
        return step.together(self.of.split, self.requests)

    def load(self) -> Load:
        op = "decode" if self.requests else "prefill"
        ranks = self.of.split.ranks
        return load(op, self.of.model, ranks, self.together, self.context)

    @property
    def sides(self) -> dict[str, str]:
        """V4.1 does not run untouched."""
        untouched = isinstance(self.of.model, Model)
        return {s: k for s, k in SIDES.items() if untouched or s != "untouched"}

    def parts(self, modelled: Modelled, side: str) -> list[Part]:
        model, split = self.of.model, self.of.split
        kernels = modelled.kernels(self.load(), split.device, side)
        if self.requests:
            return step.decode(model, split, self.together, kernels)
        count = self.together
        parts = step.prefill(model, split, count, self.context, kernels)
        if side == SIDES["patched"]:
            return sharing.with_rows_shared(parts, model, split, count)
        return parts

    def shared(self, modelled: Modelled) -> list[sharing.Shared]:
        model, split, count = self.of.model, self.of.split, self.together
        if not isinstance(model, Model):
            return []
        kernels = modelled.kernels(self.load(), split.device, SIDES["patched"])
        if self.requests:
            return sharing.decode(model, split, count, self.context, kernels)
        return sharing.prefill(model, split, count, kernels)


def cases() -> list[Case]:
    return [
        Case(of, requests, context)
        for of in bought()
        for context in CONTEXTS
        for requests in (*REQUESTS, 0)
    ]


def part_rows(modelled: Modelled) -> Iterator[dict[str, object]]:
    """Each part of each step, patched, and untouched where that differs."""
    for case in cases():
        patched = case.parts(modelled, SIDES["patched"])
        for side, kernels in case.sides.items():
            for part in case.parts(modelled, kernels):
                if side == "untouched" and part in patched:
                    continue
                yield {
                    **_cells(case),
                    "vLLM": side,
                    "part": part.name,
                    "bound": part.bound,
                    **_ends("ms", part.milliseconds, 2),
                }


def speed_rows(modelled: Modelled) -> Iterator[dict[str, object]]:
    """Tokens per second of a server, with captured graphs and without."""
    for case in cases():
        for side, kernels in case.sides.items():
            device = step.total(case.parts(modelled, kernels))
            waits = step.eager(device, step.host(case.of.model))
            if case.requests:
                speeds = [
                    step.tokens_per_second(
                        case.of.model, case.of.split, case.requests, time
                    )
                    for time in (device, waits)
                ]
            else:
                once = [_per_second(CHUNK, time) for time in (device, waits)]
                # A chunk does not wait for the one before it in another stage.
                speeds = [of.times(case.of.split.stages) for of in once]
            yield {
                **_cells(case),
                "vLLM": side,
                **_ends("tokens/s with graphs", speeds[0], 0),
                **_ends("tokens/s eager", speeds[1], 0),
            }


def sharing_rows(modelled: Modelled) -> Iterator[dict[str, object]]:
    """What ranks could share, what that saves and what it costs."""
    for case in cases():
        for shared in case.shared(modelled):
            yield {
                **_cells(case),
                "shared": shared.name,
                **_ends("saved ms", shared.saved, 2),
                **_ends("cost ms", shared.cost, 2),
                **_ends("net ms", shared.net, 2),
                "verdict": shared.verdict,
            }


def summary(
    parts: Sequence[dict[str, object]], speeds: Sequence[dict[str, object]]
) -> str:
    """The page's generated section: speed at a context of 16k, and where one step's
    time goes."""
    heads = ["devices", "model", "requests", "untouched", "patched", "gain"]
    heads.append("patched, eager")
    by_case: dict[tuple[object, ...], dict[object, dict[str, object]]] = {}
    for row in speeds:
        key = (row["devices"], row["model"], row["requests"])
        if row["context"] == CONTEXTS[0] and row["step"] == "decode":
            by_case.setdefault(key, {})[row["vLLM"]] = row
    lines = [
        [
            *key,
            _span(of["untouched"], "tokens/s with graphs")
            if "untouched" in of
            else "refused",
            _span(of["patched"], "tokens/s with graphs"),
            _gain(of, "tokens/s with graphs"),
            _span(of["patched"], "tokens/s eager"),
        ]
        for key, of in by_case.items()
    ]
    return "\n".join(
        (
            "**Modelled, not measured** (`lab/aot/costs/step.py`): tokens per second of"
            f" a server at a context of {CONTEXTS[0]:,} tokens, all requests together."
            f" All rows, prefill and {CONTEXTS[1]:,} tokens too: [{SPEED}]({SPEED}).",
            "",
            table(heads, lines),
            "",
            "Where a decode step of Flash on 16 B60 spends its time, in milliseconds of"
            f" all layers, both stages. All parts: [{PARTS}]({PARTS}).",
            "",
            _parts_table(parts),
        )
    )


def _parts_table(rows: Sequence[dict[str, object]]) -> str:
    chosen = [
        row
        for row in rows
        if row["devices"] == "16 B60"
        and row["context"] == CONTEXTS[0]
        and row["step"] == "decode"
    ]
    times: dict[str, dict[object, list[float]]] = {}
    for row in chosen:
        of = times.setdefault(_label(row), {}).setdefault(row["requests"], [0.0, 0.0])
        for end, name in enumerate(("ms from", "ms to")):
            of[end] += float(str(row[name]))
    counts = dict.fromkeys(row["requests"] for row in chosen)
    heads = [f"{count} request{'s' * (str(count) != '1')}" for count in counts]
    return table(
        ["part", *heads],
        (
            [label, *(f"{low:.2f} to {high:.2f}" for low, high in of.values())]
            for label, of in times.items()
        ),
    )


def _label(row: dict[str, object]) -> str:
    """The line of the page's table that a part belongs to."""
    name = str(row["part"])
    if row["vLLM"] == "untouched":
        return f"{name}, untouched"
    if name.endswith(WHOLE):
        return "weights that every rank reads whole"
    return "other weights beside the experts" if name in SHARDED else name


def sharing_summary(rows: Sequence[dict[str, object]]) -> str:
    """The page's table of what ranks could share in a prefill chunk: milliseconds that
    are left of the saving at 16k."""
    bought = list(
        dict.fromkeys(row["devices"] for row in rows if row["model"] != "Pro")
    )
    cells: dict[tuple[object, ...], dict[object, str]] = {}
    for row in rows:
        if row["context"] == CONTEXTS[0] and row["step"] != "decode":
            key = (row["shared"],)
            cells.setdefault(key, {})[row["devices"]] = _span(row, "net ms")
    lines = [[*key, *(of[name] for name in bought)] for key, of in cells.items()]
    return "\n".join(
        (
            "**Modelled, not measured** (`lab/aot/costs/sharing.py`): milliseconds that"
            f" a prefill chunk of {CHUNK:,} tokens of Flash saves at a context of"
            f" {CONTEXTS[0]:,}, least saving and highest cost to highest saving and"
            " least cost; negative is a loss. All rows, of decode as well, with both"
            f" terms: [{SHARING}]({SHARING}).",
            "",
            table(["shared", *map(str, bought)], lines),
        )
    )


def _cells(case: Case) -> dict[str, object]:
    split = case.of.split
    stages = f", PP {split.stages}" if split.stages > 1 else ""
    return {
        "devices": case.of.name,
        "model": case.of.model.name,
        "split": f"TP {split.ranks}{stages}",
        "step": "decode" if case.requests else f"prefill of {CHUNK}",
        "requests": case.requests or 1,
        "context": case.context,
    }


def _ends(name: str, value: Range, digits: int) -> dict[str, object]:
    low, high = sorted((value.fast, value.slow))
    return {f"{name} from": f"{low:.{digits}f}", f"{name} to": f"{high:.{digits}f}"}


def _span(row: dict[str, object], name: str) -> str:
    return f"{row[f'{name} from']} to {row[f'{name} to']}"


def _gain(of: dict[object, dict[str, object]], name: str) -> str:
    """Patched over untouched, at the same end of all constants."""
    if "untouched" not in of:
        return ""
    ratios = sorted(
        float(str(of["patched"][f"{name} {end}"]))
        / float(str(of["untouched"][f"{name} {end}"]))
        for end in ("from", "to")
    )
    return " to ".join(f"{ratio:.1f}" for ratio in ratios)


def _per_second(tokens: int, time: Range) -> Range:
    return Range(1e3 * tokens / time.fast, 1e3 * tokens / time.slow)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.aot.costs.step_page",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("--docs", type=Path, help="write this page's section")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(arguments)
    cache = Cache.default()
    try:
        if options.docs:
            for name in (SECTION, SHARING_SECTION):
                with_section(options.docs, name, "")
        compile_all = partial(
            compiler.compile_all,
            devices=sorted({of.split.device.target for of in bought()}),
            ocloc=find(cache.root / "ocloc", refresh=False),
            store=cache,
            jobs=options.jobs,
        )
        with upstream.newer_softmax():
            modelled = Modelled([case.load() for case in cases()], cache, compile_all)
        parts, speeds = list(part_rows(modelled)), list(speed_rows(modelled))
        forms = list(sharing_rows(modelled))
        said = summary(parts, speeds)
        print(said)
        if options.docs:
            folder, project = options.docs.parent, Project.find()
            for name, rows in ((PARTS, parts), (SPEED, speeds), (SHARING, forms)):
                (folder / name).write_text(csv_text(stamped(project, rows)))
            options.docs.write_text(with_section(options.docs, SECTION, said))
            shared = sharing_summary(forms)
            options.docs.write_text(with_section(options.docs, SHARING_SECTION, shared))
    except (OclocError, StackError) as error:
        print(error, file=sys.stderr)
        return 5
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
