# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.benchmarks.xpu_path.page RESULTS`: write what came back from the GPU.

Compares `eager.pt` and `graphs.pt` with Hugging Face as in `tests/proof/e2e`, and their
tokens with each other. Writes the generated part of `docs/xpu_path.md`.
"""

import argparse
import json
import tempfile
from pathlib import Path

from stack.core.project import Project
from stack.pages.made import stamp

from .jobs import command

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/xpu_path.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


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
        for name in ("eager", "graphs")
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


def main() -> None:
    """Write the part of the page between its marks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--release", default="v0.33.0", help="the release of RESULTS")
    arguments = parser.parse_args()
    folder: Path = arguments.results
    machine = json.loads((folder / "jobs.json").read_text())["machine"]
    made = stamp(Project(ROOT), arguments.release, command("eager", "graphs"))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    figures = "\n".join(
        [
            f"{arguments.release}, tree {made['tree_id']}, on one {machine},"
            f" {made['made']}.",
            "",
            "## Against Hugging Face",
            "",
            *engine_table(folder),
            *soak_lines(folder),
        ]
    )
    PAGE.write_text(f"{before}{BEGIN}\n\n{figures}\n\n{END}{after}")


if __name__ == "__main__":
    main()
