# SPDX-License-Identifier: Apache-2.0
"""The splits that start, the fastest first; what limits each; and how to serve it."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from aot import model as devices
from aot import step
from aot.step import Kernels, Part, Range, Split
from benchmarks.memory import SPLITS, Model, room
from planner.asked import ACTIVATIONS, Asked, short
from planner.trial import MANY_REQUESTS, Attempt, Trial
from xpustack.base.releases import Release
from xpustack.core.errors import CheckFailed, command

GIB = 1 << 30
WITHOUT = Kernels({}, {})
"""Attention and the indexer's scores are left out: nobody compiles them for a plan."""
OFFICIAL_SINCE = (0, 26)
"""The first release with an image of upstream's; deploy/official.Containerfile."""
IMAGE = "vllm-xpu-dsv4"


@dataclass(frozen=True)
class Choice:
    """A split that starts.

    Attributes:
        attempt: with the largest chunk of a prompt that leaves room for all requests,
            or else the most room.
        speed: modelled tokens per second of all requests.
        slowest: the part of a modelled step that takes longest.
    """

    attempt: Attempt
    serves: bool
    speed: Range
    slowest: Part

    def limit(self, asked: Asked) -> str:
        """What there is too little of, or what takes longest."""
        if not self.serves:
            return f"cache: {self.attempt.room} of {asked.requests} requests fit"
        return f"{self.slowest.bound}: {self.slowest.name}"


def choices(asked: Asked, trial: Trial) -> list[Choice]:
    """Those that start: first those that serve all requests, then the fastest by the
    middle of the modelled range."""
    best: dict[str, Attempt] = {}
    for attempt in trial.attempts:
        known = best.get(attempt.name)
        if attempt.room and (known is None or attempt.room > known.room):
            best[attempt.name] = attempt
    found = [_choice(asked, attempt) for attempt in best.values()]
    found.sort(key=lambda one: one.speed.slow * one.speed.fast, reverse=True)
    return sorted(found, key=lambda one: not one.serves)


def _choice(asked: Asked, attempt: Attempt) -> Choice:
    model, serves = asked.checkpoint.model, attempt.room >= asked.requests
    split = Split(
        next(one for one in devices.devices() if one.name == asked.device.name),
        attempt.tensor_parallel_size,
        attempt.pipeline_parallel_size,
        attempt.data_parallel_size,
        expert_parallel=attempt.enable_expert_parallel,
    )
    at_once = min(asked.requests, attempt.room)
    together = step.together(split, at_once)
    parts = step.decode(model, split, together, WITHOUT)
    return Choice(
        attempt,
        serves,
        step.tokens_per_second(model, split, at_once, step.total(parts)),
        max(parts, key=lambda part: part.milliseconds.slow),
    )


def refusals(trial: Trial, chosen: Iterable[Choice]) -> list[Attempt]:
    """The last attempt of each split that does not start."""
    started = {choice.attempt.name for choice in chosen}
    return list({a.name: a for a in trial.attempts if a.name not in started}.values())


def pinned_bytes(attempt: Attempt) -> int:
    """What all ranks pin in the memory of their host."""
    return attempt.ranks * sum(stage.pinned for stage in attempt.stages)


def missing(asked: Asked, attempt: Attempt) -> float:
    """GiB that a rank lacks for its weights and activations; 0 if those fit."""
    if not attempt.built:
        return 0.0
    needed = attempt.fullest.held + ACTIVATIONS
    return max(0.0, (needed - asked.usable()) / GIB)


def why(asked: Asked, attempt: Attempt) -> str:
    """Why a split does not start, in one line."""
    if lacks := missing(asked, attempt):
        held = attempt.fullest.held / GIB
        pinned = pinned_bytes(attempt) / GIB
        return (
            f"{lacks:.1f} GiB short on a device: weights and buffers {held:.1f},"
            f" activations {ACTIVATIONS / GIB:.0f}, usable {asked.usable() / GIB:.1f}"
            + (f"; the host pins {pinned:.0f} besides" if pinned else "")
        )
    return " ".join(attempt.refused.split()) or "no request of this context fits"


def nothing_fits(asked: Asked, release: Release, refused: list[Attempt]) -> CheckFailed:
    """The error if no split starts: of those that lack memory, the one that lacks
    least."""
    lacking = [one for one in refused if one.built]
    nearest = min(lacking or refused, key=lambda one: missing(asked, one))
    enough = _enough(asked)
    return CheckFailed(
        f"{asked.checkpoint.label} starts on no split of {asked.count}"
        f" {asked.device.name}",
        detail=[f"{nearest.name}: {why(asked, nearest)}"],
        hint=command(
            *("python", "-m", "xpustack", "plan", release.name),
            *("--model", asked.checkpoint.name or asked.checkpoint.folder),
            *("--device", short(asked.device), "--count", enough),
        )
        if enough
        else "another device: docs/deploying.md, Memory",
    )


def _enough(asked: Asked) -> int:
    """The fewest devices of `SPLITS` on which a V4 fits; 0 if none is known."""
    model = asked.checkpoint.model
    if not isinstance(model, Model):
        return 0
    counts = [
        ranks * stages
        for ranks, stages in SPLITS
        if model.groups % ranks == 0
        and room(model, ranks, asked.device, stages) > asked.context
        and ranks * stages > asked.count
    ]
    return min(counts, default=0)


def arguments(asked: Asked, attempt: Attempt) -> list[str]:
    """What follows `vllm serve MODEL`."""
    architecture = asked.checkpoint.architecture
    found = [f"--tensor-parallel-size {attempt.tensor_parallel_size}"]
    if attempt.pipeline_parallel_size > 1:
        found.append(f"--pipeline-parallel-size {attempt.pipeline_parallel_size}")
    if attempt.data_parallel_size > 1:
        found.append(f"--data-parallel-size {attempt.data_parallel_size}")
    if attempt.enable_expert_parallel:
        found.append("--enable-expert-parallel")
    found += [
        "--kv-cache-dtype fp8",
        f"--block-size {architecture.block_size}",
        f"--max-model-len {asked.context}",
        f"--max-num-batched-tokens {attempt.max_num_batched_tokens}",
        "--gpu-memory-utilization 0.9",
    ]
    if asked.of_a_replica > MANY_REQUESTS:
        found.append(f"--max-num-seqs {asked.of_a_replica}")
    if architecture.images:
        found.append("""--limit-mm-per-prompt '{"image": 0}'""")
    return [
        *found,
        f"--reasoning-parser {architecture.parser}",
        f"--tool-call-parser {architecture.parser}",
        "--enable-auto-tool-choice",
    ]


def serve(asked: Asked, attempt: Attempt) -> str:
    """The command, as docs/deploying.md recommends it."""
    words = ["VLLM_WORKER_MULTIPROC_METHOD=spawn vllm serve"]
    words.append(shlex.quote(str(asked.checkpoint.folder)))
    return " ".join([*words, *arguments(asked, attempt)])


def container(asked: Asked, attempt: Attempt, release: Release) -> str:
    """The same in the image that docs/deploying.md builds."""
    volume = shlex.quote(f"{asked.checkpoint.folder}:/model:ro")
    return " ".join(
        [
            "docker run --rm --device /dev/dri --group-add video --group-add render",
            f"--ipc host --publish 8000:8000 --volume {volume}",
            f"{IMAGE}:{release.version} /model",
            *arguments(asked, attempt),
        ]
    )
