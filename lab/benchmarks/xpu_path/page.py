# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.benchmarks.xpu_path.page RESULTS`: write what came back from the GPU.

Reads `flash-*.json` and, where it is there, `eager.pt` and `graphs.pt`, which are
compared with Hugging Face as in `tests/proof/e2e`, and `streams.pt` and `triton.pt`. Of
an older release it takes `flash-eager-*.json`. Writes `docs/data/xpu_path.csv` and the
generated part of `docs/xpu_path.md`.
"""

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stack.core.project import Project
from stack.core.rows import csv_text
from stack.pages.made import stamp

from .cache_pages import IN_FP8
from .jobs import command
from .parts import part_of

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/xpu_path.md"
DATA = ROOT / "docs/data"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
TREES = {
    "flash-untouched": "untouched",
    "flash-patched": "patched",
    "flash-patched-triton": "patched, Triton",
}
OLDER_TREES = {"flash-eager-untouched": "untouched", "flash-eager-patched": "patched"}
HEADS = ("tree", "kind", "batch", "tokens")
Case = tuple[str, int, int]
Results = dict[str, dict[str, Any]]
"""What `bench` wrote, by the name of the tree."""
SHOWN = 16_384
"""Tokens of the decode steps in the page's table; the data have the others."""
WARM = 4
"""Replays left out at the beginning of a case."""
Sums = dict[str, tuple[float, float]]


def sums_of(case: dict[str, Any]) -> Sums:
    """Microseconds of each part in one step, and those of them in stand-ins."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in case["eager"]["rows"]:
        part = part_of(row["part"], row["stand_in"])
        time = row["microseconds"] / case["eager"]["profiled"]
        found[part][0] += time
        found[part][1] += time if row["stand_in"] else 0.0
    return {part: (both[0], both[1]) for part, both in found.items()}


def read(folder: Path, trees: dict[str, str]) -> Results:
    """The results of each tree that has some.

    Raises:
        SystemExit: naming the folder, if a tree is missing that a table compares.

    """
    results = {
        name: json.loads((folder / f"{file}.json").read_text())
        for file, name in trees.items()
        if (folder / f"{file}.json").is_file()
    }
    if missing := {"patched", "untouched"} - set(results):
        raise SystemExit(f"{folder} has no results of: {', '.join(sorted(missing))}")
    return results


def key(case: dict[str, Any]) -> Case:
    return case["kind"], case["batch"], case["tokens"]


def time_of(case: dict[str, Any]) -> float:
    """Milliseconds of a step: the median replay, or an eager prompt's step."""
    graphs = case["graphs"]
    return float(statistics.median(graphs["replays"][WARM:] or graphs["steps"][1:]))


def rows_of(results: Results) -> Iterator[dict[str, object]]:
    """One row for each tree, case and part, and for steps in graphs."""
    for tree, result in results.items():
        for case in result["cases"]:
            which = dict(zip(HEADS, (tree, *key(case)), strict=True))
            for part, (time, inside) in sums_of(case).items():
                times = {"microseconds": f"{time:.1f}", "in_stand_ins": f"{inside:.1f}"}
                yield {**which, "part": part, **times}
            if "graphs" in case:
                step = {"microseconds": f"{1e3 * time_of(case):.0f}"}
                yield {**which, "part": "step", **step, "in_stand_ins": ""}


def write_data(releases: dict[str, Results]) -> None:
    """The rows of each release, with the job that gave them."""
    project = Project(ROOT)
    rows = []
    for release, results in releases.items():
        first = next(iter(releases)) == release
        jobs = {of: job for job, of in (TREES if first else OLDER_TREES).items()}
        for row in rows_of(results):
            how = command(jobs[str(row["tree"])])
            rows.append({"release": release, **row, **stamp(project, release, how)})
    (DATA / "xpu_path.csv").write_text(csv_text(rows))


def attention_table(results: Results) -> list[str]:
    """Attention of prompts and of decode at `SHOWN` tokens, with its largest error to
    float64."""
    cases = {
        tree: {key(case): case for case in result["cases"]}
        for tree, result in results.items()
    }
    lines = [
        "| case | untouched, µs | patched, µs | ratio | error, untouched | patched |",
        "|---|---|---|---|---|---|",
    ]
    for case, ours in cases["patched"].items():
        if case[0] == "decode" and case[2] != SHOWN:
            continue
        theirs = cases["untouched"][case]
        before, after = (sums_of(c)["attention"][0] for c in (theirs, ours))
        errors = [
            max(
                error
                for mode in ("eager", "graphs")
                for label, error in c.get(mode, {"errors": {}})["errors"].items()
                if not label.endswith(IN_FP8)
            )
            for c in (theirs, ours)
        ]
        lines.append(
            f"| {named(case)} | {before:.0f} | {after:.0f} | {before / after:.1f} |"
            f" {100 * errors[0]:.0f} % | {100 * errors[1]:.2f} % |"
        )
    return lines


def named(case: Case) -> str:
    kind, batch, tokens = case
    return (
        f"{kind}, {batch} at {tokens:,}" if kind == "decode" else f"{kind}, {tokens:,}"
    )


def tokens_lines(results: Results) -> list[str]:
    """In which cases eager and captured steps gave other tokens."""
    lines = []
    for tree, result in results.items():
        differing = []
        for case in result["cases"]:
            pairs = zip(case["eager"]["tokens"], case["graphs"]["tokens"], strict=True)
            equal = sum(a[:4] == b[:4] for a, b in pairs)
            if equal < case["batch"]:
                differing.append(f"{named(key(case))}: {equal} of {case['batch']}")
        said = "; ".join(differing) or "all requests of all cases"
        lines.append(f"- {tree}, requests with equal tokens: {said}")
    return lines


def engine_table(folder: Path) -> list[str]:
    """The tiny checkpoint's engines against Hugging Face, by ratio the worst of all
    prompts: bounds of `e2e`."""
    import torch

    from proof.e2e.checkpoints import checkpoint
    from proof.e2e.judging import checks
    from proof.e2e.running.serving import Job, Prompt, Served
    from proof.e2e.twins.twin import Twin

    from .jobs import MIXED

    lines = [
        "| engine | ratio | float32 | core | output | overlap |",
        "|---|---|---|---|---|---|",
    ]
    below: list[str] = []
    job = Job("mixed", (tuple(Prompt(n, new, seed) for n, new, seed in MIXED),))
    with tempfile.TemporaryDirectory() as made:
        twin = Twin(checkpoint.write(Path(made))[1])
        for name in ("eager", "graphs"):
            if not (folder / f"{name}.pt").is_file():
                continue
            answer = torch.load(folder / f"{name}.pt", weights_only=False)
            for part in ("read", "tokens"):
                answer[part] = answer[part][:1]
            served = Served(job, answer, "", 0.0)
            errors = checks.check_attention(served, twin)
            for ratio in dict.fromkeys(error.ratio for error in errors):
                of = [error for error in errors if error.ratio == ratio]
                plain, core, output = (
                    100 * max(getattr(error, figure) for error in of)
                    for figure in ("plain", "core", "output")
                )
                overlaps = [e.overlap for e in of if e.overlap is not None]
                overlap = f"{min(overlaps):.3f}" if overlaps else ""
                lines.append(
                    f"| {name} | {ratio} | {plain:.1f} % | {core:.2f} % |"
                    f" {output:.3f} % | {overlap} |"
                )
            experts = max(checks.check_experts(served, twin).values())
            checks.check_logits(served, twin)
            tokens = " · ".join(" ".join(map(str, t)) for t in answer["tokens"][0])
            below += [
                "",
                f"{name}: experts off by at most {100 * experts:.2f} %."
                f" Tokens: {tokens}",
            ]
    return [*lines, *below]


def soak_lines(folder: Path) -> list[str]:
    """How many of the requests that arrive while others decode have eager tokens."""
    import torch

    answers = {
        name: torch.load(folder / f"{name}.pt", weights_only=False)["tokens"][1:]
        for name in ("eager", "graphs", "streams", "triton")
        if (folder / f"{name}.pt").is_file()
    }
    if "eager" not in answers:
        return []
    (eager,) = answers.pop("eager")
    lines = [
        "",
        "Requests that have the same tokens as in eager mode, by round:",
        "",
        "| engine | requests | first round | second round | rounds are equal |",
        "|---|---|---|---|---|",
    ]
    for name, (first, second) in answers.items():
        counts = (
            sum(a == b for a, b in zip(eager, answer, strict=True))
            for answer in (first, second)
        )
        cells = [name, len(eager), *counts, "yes" if first == second else "no"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def page(releases: dict[str, Results], engine: list[str]) -> str:
    """The generated part: the first release, and attention of the others."""
    (release, results), *others = releases.items()
    any_result = results["patched"]
    lines = [
        f"{release} on one {any_result['device']}, torch {any_result['torch']},"
        f" Triton {any_result['triton']}, CUDA {any_result['cuda']}.",
        "",
        "## Against Hugging Face",
        "",
        *engine,
        "",
        "## Attention",
        "",
        "Decode of more and fewer tokens, and all parts of each step:"
        " [data/xpu_path.csv](data/xpu_path.csv).",
        "",
        *attention_table(results),
        "",
    ]
    for older, theirs in others:
        lines += [f"## Attention, {older}", "", *attention_table(theirs), ""]
    return "\n".join([*lines, "## Eager and captured", "", *tokens_lines(results)])


def main() -> None:
    """Write the data, and the part of the page between its marks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--release", default="v0.33.0", help="the release of RESULTS")
    parser.add_argument("--older", nargs=2, metavar=("RELEASE", "FOLDER"))
    arguments = parser.parse_args()
    folder: Path = arguments.results
    releases = {arguments.release: read(folder, TREES)}
    if arguments.older:
        older, its_folder = arguments.older
        releases[older] = read(Path(its_folder), OLDER_TREES)
    write_data(releases)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    figures = page(releases, [*engine_table(folder), *soak_lines(folder)])
    PAGE.write_text(f"{before}{BEGIN}\n\n{figures}\n\n{END}{after}")


if __name__ == "__main__":
    main()
