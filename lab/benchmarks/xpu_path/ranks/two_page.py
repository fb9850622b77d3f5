# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.benchmarks.xpu_path.ranks.two_page RESULTS`: rows of
`docs/data/two_gpus.csv` from what jobs on two GPUs left. Rows of other jobs stay."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stack.core.project import Project
from stack.core.rows import csv_text, read_rows
from stack.pages.made import stamp

from ..jobs import command
from . import answers, rank_sums
from .two_gpus import TWO_JOBS

ROOT = Path(__file__).resolve().parents[4]
DATA = ROOT / "docs/data/two_gpus.csv"
Found = Iterator[tuple[str, str]]
"""What was looked at, and what was found."""


def of_sums(ranks: list[dict[str, Any]]) -> Found:
    """Checks of both ranks, and the time of a sum on the first."""
    names = list(ranks[0]["outcomes"])
    wrong = {said.split(": ")[1] for said in rank_sums.wrong(ranks)}
    for name in names:
        ends = "red" if name.endswith("without its guard") else "passes"
        yield name, "not as it must be" if name in wrong else ends
    for shape, times in ranks[0]["microseconds"].items():
        took = ", ".join(f"{how} {one:.0f} µs" for how, one in times.items())
        yield f"bf16 {shape}", took


def of_graph_check(ranks: list[dict[str, Any]], drafts: dict[str, int]) -> Found:
    """Whether ranks kept their graphs, and how long the check took."""
    kept = {found["has_graphs"] for found in ranks}
    names = {frozenset({True}): "stay", frozenset({False}): "go from both ranks"}
    yield "graphs", names.get(frozenset(kept), "differ between the ranks")
    yield (
        "seconds",
        f"{max(second for found in ranks for second in found['seconds']):.1f}",
    )
    if drafts:
        yield "drafts", f"{drafts['accepted']} of {drafts['drafted']} accepted"


def of_transfer(prompts: list[dict[str, Any]]) -> Found:
    """Blocks and bytes of all prompts; the distance of answers."""
    entries = [e for p in prompts for e in p["pages"]["groups"].values()]
    totals = {
        name: sum(entry[name] for entry in entries)
        for name in ("compared", "known", "wrong", "missing")
    }
    stray = sum(prompt["pages"]["stray"] for prompt in prompts)
    yield "lengths", " ".join(str(prompt["length"]) for prompt in prompts)
    yield (
        "blocks",
        f"{totals['compared']} compared, {totals['known']} known, "
        f"{totals['missing']} missing",
    )
    yield "wrong bytes", f"{totals['wrong']}, and {stray} of other blocks"
    answered = [p for p in prompts if p["alone"]]
    same = sum(p["answer"]["tokens"] == p["alone"]["tokens"] for p in answered)
    yield "answers of the sender alone", f"{same} of {len(answered)}"


def of_killed(prompts: list[dict[str, Any]]) -> Found:
    """What became of the prompt whose sender died, and of the one after it."""
    _, second, third = prompts
    same = second["tokens"] == second["alone"]["tokens"]
    how = f"{'right' if same else 'other'} tokens" if second["tokens"] else "no token"
    if second.get("states"):
        yield "the copy when its sender died", " ".join(second["states"])
    yield "the prompt", f"ends with {second['reason']}, {how}"
    yield "the next one", f"ends with {third['reason']}"


def of_times(found: dict[str, Any]) -> Found:
    """Seconds, and what went over each rank's link."""
    for case in found["cases"]:
        name = f"{case['batch']} of {case['length']:,} tokens"
        if "token" not in case:
            yield name, f"{case['short']:.3f} s"
            continue
        yield f"{name}, a step", f"{1e3 * case['token']:.2f} ms"
        for rank, counts in enumerate(case["rank counts"]):
            if counts["hits"] + counts["misses"]:
                read = counts["misses"] * found["bytes"][rank]
                steps = steps_of(case)
                yield (
                    f"{name}, rank {rank}'s link",
                    f"{read / steps / 1e6:.1f} MB a step: {counts['misses']} misses, "
                    f"{counts['hits']} hits, {counts['copies']} copies",
                )
            if (rate := case["received"][rank]) is not None:
                yield (
                    f"{name}, rank {rank}'s link by its counters",
                    f"{rate * case['token'] / 1e6:.1f} MB a step",
                )


def steps_of(case: dict[str, Any]) -> int:
    """The steps of the longer answers of a case: of a prompt, and of tokens."""
    return len(case["long"]) * int(case["new"])


def of_served(found: dict[str, Any]) -> Found:
    """Answers over HTTP beside those of the request alone."""
    for how, count in found["counts"].items():
        yield how, str(count)
    yield "requests with equal rounds", str(found["requests with equal rounds"])
    yield "seconds", " ".join(f"{second:.0f}" for second in found["seconds"])


def of_job(name: str, found: Any) -> Found:
    """The rows of a job's JSON."""
    if name == "two-sums":
        yield from of_sums(found)
    elif name.startswith("two-graph-check"):
        yield from of_graph_check(found["ranks"], found["drafts"])
    elif "killed" in name:
        yield from of_killed(found)
    elif name.startswith("two-transfer"):
        yield from of_transfer(found)
    elif name.startswith("two-timed"):
        yield from of_times(found)
    elif name == "two-served":
        yield from of_served(found)


def jobs_of(name: str) -> list[str]:
    """The jobs that the rows of a job need, in the order in which they run: whose texts
    its draft knows, and what its tokens are held to."""
    known = TWO_JOBS[name].told.get("known")
    other = answers.other_of(name) if TWO_JOBS[name].suffix != "json" else None
    return list(dict.fromkeys(job for job in (known, other, name) if job))


def rows(results: Path) -> Iterator[tuple[str, str, str]]:
    """Job, what, and what was found, of all jobs in a folder."""
    for name, job in TWO_JOBS.items():
        path = results / f"{name}.{job.suffix}"
        if job.suffix == "json" and path.is_file():
            for what, value in of_job(name, json.loads(path.read_text())):
                yield name, what, value
    if (results / answers.FILE).is_file():
        told = answers.read(results)
        for one in answers.comparisons(told):
            yield one.job, f"tokens of {one.other}", f"{one.same} of {one.tokens}"
            if one.behind:
                yield one.job, "first others behind by", one.leads
            if drafts := told[one.job]["drafts"]:
                counts = f"{drafts['accepted']} of {drafts['drafted']} accepted"
                yield one.job, "drafts", counts
            if any(times := told[one.job]["exchanged"]):
                yield one.job, "exchanges of shared rows", str(times)


def merged(
    before: list[dict[str, str]], found: list[dict[str, str]]
) -> list[dict[str, str]]:
    """All rows, those of a job that ran again in place of its older ones."""
    again = {(row["release"], row["job"]) for row in found}
    kept = [row for row in before if (row["release"], row["job"]) not in again]
    return sorted([*kept, *found], key=lambda row: (row["release"], row["job"]))


def main() -> None:
    """Write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--release", default="v0.33.0", help="the release of RESULTS")
    arguments = parser.parse_args()
    project, release = Project(ROOT), arguments.release
    found = [
        {"release": release, "job": job, "what": what, "found": value}
        | stamp(project, release, command(*jobs_of(job)))
        for job, what, value in rows(arguments.results)
    ]
    DATA.write_text(csv_text(merged(read_rows(DATA), found)))


if __name__ == "__main__":
    main()
