# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.benchmarks.xpu_path.beside RESULTS`: V4.1 and V4 Vision on a GPU,
beside the CPU.

Serves the prompts of the jobs on the emulated XPU, holds what came back from the GPU to
the same bounds and tokens, and drafts to the tokens without them. Writes
docs/data/e2e_gpu.csv, and prints what the untouched release ended with.
"""

import argparse
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from proof.e2e.checkpoints import dspark, v41, vision
from proof.e2e.judging import checks, v41_checks
from proof.e2e.judging.drafts import check_drafts, successors
from proof.e2e.judging.ranks import near_ties
from proof.e2e.judging.v41_draft import check_draft
from proof.e2e.pictures import Picture
from proof.e2e.running.serving import Engines, Job, Prompt, Served, opened_engines
from proof.e2e.twins.tower import Tower
from proof.e2e.twins.twin import Reference
from proof.e2e.twins.v41_draft_twin import V41DraftTwin
from proof.e2e.twins.v41_twin import V41Twin
from proof.e2e.twins.vision_twin import VisionTwin, rows_of
from stack.core.cache import Cache
from stack.core.project import Project
from stack.core.rows import csv_text
from stack.pages.made import stamp

from .jobs import DRAFTS, IMAGE, SEEN, THREE_IMAGES, V41_IMAGE, V41_MIXED, command
from .jobs import JOBS as ON_GPU

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "docs/data/e2e_gpu.csv"
CPU, EAGER, GRAPHS = "CPU", "GPU, eager", "GPU, graphs"
ERROR = re.compile(r"(?:\w*Error: |Value error, ).*")


def seen(image: int) -> tuple[tuple[Prompt, ...], ...]:
    """The prompts of `SEEN` with the token `image` where one goes."""
    return tuple(
        tuple(
            Prompt(
                length,
                new,
                seed,
                images=tuple(Picture(*drawn) for drawn in images),
                image_token=image,
            )
            for length, new, seed, images in wave
        )
        for wave in SEEN
    )


def job(
    name: str, waves: tuple[tuple[Prompt, ...], ...], engine: dict[str, Any]
) -> Job:
    """An engine with the checkpoint of that name."""
    return Job(name, waves, tuple(engine.items()), checkpoint=name)


SERVER = dict(v41.SERVER)
TEXT = job("v4.1", (tuple(Prompt(*numbers) for numbers in V41_MIXED),), SERVER)
DRAFTED = job("v4.1 with drafts", TEXT.waves, SERVER | DRAFTS)
JOBS = {
    "vision": job("vision", seen(IMAGE), dict(vision.ENGINE) | THREE_IMAGES),
    "v41": TEXT,
    "v41-images": job("v4.1 with images", seen(V41_IMAGE), SERVER | THREE_IMAGES),
}
"""What the CPU is asked, by the first part of the names of the GPU's jobs."""


def from_gpu(results: Path, name: str, asked: Job) -> Iterator[tuple[str, Served]]:
    """What each mode gave, where it ran."""
    for where, file in (
        (EAGER, results / f"{name}-eager.pt"),
        (GRAPHS, results / f"{name}-graphs.pt"),
    ):
        if file.is_file():
            answer = torch.load(file, weights_only=False)
            yield where, Served(asked, answer, "", 0.0)
        else:
            print(f"{file.name}: not there")


def attention_rows(where: str, served: Served, twin: Reference) -> list[dict[str, Any]]:
    """The errors of each prompt and layer; experts are held to their bound as well.

    Raises:
        AssertionError: one is beyond its bound.
    """
    twin.look_at(served)
    errors = checks.check_attention(served, twin)
    checks.check_experts(served, twin)
    return [
        {
            "checkpoint": served.job.checkpoint,
            "where": where,
            "tokens": error.tokens,
            "layer": error.layer,
            "ratio": error.ratio,
            "float32 %": f"{100 * error.plain:.2f}",
            "core %": f"{100 * error.core:.2f}",
            "output %": f"{100 * error.output:.3f}",
            "overlap": "" if error.overlap is None else f"{error.overlap:.4f}",
        }
        for error in errors
    ]


def check_around(served: Served, twin: Reference) -> None:
    """Logits, the tower of images, and V4.1's streams between the layers."""
    checks.check_logits(served, twin)
    if isinstance(twin, V41Twin):
        v41_checks.check_streams(served, twin)
        checks.check_tower(served, twin.weights, Tower.encoded)
    if isinstance(twin, VisionTwin):
        checks.check_tower(served, twin.weights, rows_of)


def compare(engines: Engines, release: str, results: Path) -> Iterator[dict[str, Any]]:
    """Hold the results to the CPU's; the rows of each engine."""
    for name, asked in JOBS.items():
        one = engines.serve(release, asked)
        twin = engines.twin_of(asked.checkpoint)
        for where, served in ((CPU, one), *from_gpu(results, name, asked)):
            print(f"{name}: {where}", served.new_tokens())
            yield from attention_rows(where, served, twin)
            check_around(served, twin)
            print(near_ties([served], one, twin))
    plain = dict(from_gpu(results, "v41", TEXT))
    for where, served in from_gpu(results, "v41-drafts", DRAFTED):
        print(f"v41-drafts: {where}", served.new_tokens())
        yield from drafted_rows(engines, where, served, plain[where])


def drafted_rows(
    engines: Engines, where: str, served: Served, plain: Served
) -> Iterator[dict[str, Any]]:
    """Tokens are those of `plain`, which has no drafts; as many are accepted as follow
    from them; the rows that were verified, and in eager mode the draft's own layers.
    """
    known = successors(plain)
    checks.check_same_tokens(served, plain)
    check_drafts(served, known.get, dspark.BLOCK)
    engines.add_checkpoint(DRAFTED.checkpoint, v41.V41(0, known))
    twin = engines.twin_of(DRAFTED.checkpoint)
    assert isinstance(twin, V41DraftTwin)
    yield from attention_rows(where, served, twin)
    # A replay writes down nothing of the draft.
    if where == EAGER:
        check_draft(served, twin)


def asked_by(checkpoint: str, where: str) -> str:
    """What gave a row: jobs on the GPU's machine, or this program on a CPU."""
    if where == CPU:
        return "python -m lab.benchmarks.xpu_path.beside OUT"
    names = {asked.checkpoint: name for name, asked in JOBS.items()}
    names[DRAFTED.checkpoint] = "v41-drafts"
    job = f"{names[checkpoint]}-{where.removeprefix('GPU, ')}"
    known = ON_GPU[job].told.get("known")
    return command(*([known] if known else []), job)


def main() -> None:
    """Compare, write the rows, and print tokens and refusals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--release", default="v0.33.0", help="the release of RESULTS")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as made,
        opened_engines(Path(made), Cache.default()) as engines,
    ):
        rows = [
            {"release": arguments.release, **row}
            for row in compare(engines, arguments.release, arguments.results)
        ]
    project = Project(ROOT)
    for row in rows:
        how = asked_by(row["checkpoint"], row["where"])
        row |= stamp(project, arguments.release, how)
    DATA.write_text(csv_text(rows))
    for log in sorted(arguments.results.glob("*-untouched.log")):
        print(log.stem, *ERROR.findall(log.read_text())[-1:])


if __name__ == "__main__":
    main()
