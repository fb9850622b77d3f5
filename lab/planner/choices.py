# SPDX-License-Identifier: Apache-2.0
"""The splits that start, the fastest first; what limits each; and how to serve it."""

import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from packaging.version import Version

from lab.aot.costs import host_experts, prompts, step
from lab.aot.costs import model as devices
from lab.aot.costs.host_experts import Slots
from lab.aot.costs.step import NOTHING, Kernels, Part, Range, Split
from lab.memory import Shapes
from lab.planner import splits
from lab.planner.asked import CONCURRENCY, CONTEXT, LINK, SHARE, Asked, short
from lab.planner.trial import MANY_REQUESTS, Attempt, Trial
from stack.base.releases import Release
from stack.core.errors import CheckFailed

GIB = 1 << 30
PROMPTS = (8192, 131_072)
"""Tokens of prompts whose first token is modelled."""
WITHOUT = Kernels({}, {})
"""Attention and the indexer's scores are left out: nobody compiles them for a plan."""
OFFICIAL_SINCE = (0, 26)
"""The first release of which upstream has an image, which ours then starts from."""
IMAGE = "vllm-xpu-dsv4"
HOST_SINCE = "0.31"
"""The first release that can keep experts in the host's memory."""
FEW = 4
"""So few devices do not hold the experts: docs/deploying.md, One to four cards."""


@dataclass(frozen=True)
class Choice:
    """A split that starts.

    Attributes:
        attempt: with the largest chunk of a prompt that leaves room for all requests,
            or else the most room.
        speed: modelled tokens per second of all requests.
        alone: the same of one that comes alone.
        slowest: the part of a modelled step that takes longest.
        first_token: modelled seconds until it, by tokens of the prompt.
        link_bytes: what a token reads of experts in the host's memory, on each device.
    """

    attempt: Attempt
    serves: bool
    speed: Range
    alone: Range
    slowest: Part
    first_token: Mapping[int, Range]
    link_bytes: Range

    def limit(self, asked: Asked) -> str:
        """What there is too little of, or what takes longest."""
        if not self.serves:
            return f"cache: {self.attempt.room} of {asked.requests} requests fit"
        return f"{self.slowest.bound}: {self.slowest.name}"


def choices(asked: Asked, trial: Trial) -> list[Choice]:
    """Those that start: first those that serve all requests, then the fastest by the
    middle of the modelled range."""
    found = [_choice(asked, attempt) for attempt in _best(trial, searched=False)]
    found.sort(key=lambda one: one.speed.slow * one.speed.fast, reverse=True)
    return sorted(found, key=lambda one: not one.serves)


def _best(trial: Trial, *, searched: bool) -> list[Attempt]:
    """The attempt with the most room of each split that starts."""
    best: dict[tuple[int, str], Attempt] = {}
    for attempt in trial.attempts:
        place = attempt.devices, attempt.name
        known = best.get(place)
        if attempt.searched is not searched or not attempt.room:
            continue
        if known is None or attempt.room > known.room:
            best[place] = attempt
    return list(best.values())


def fewest(asked: Asked, trial: Trial) -> Attempt | None:
    """Of all splits that were started the one of the fewest devices that carries the
    whole load."""
    started = [*_best(trial, searched=False), *_best(trial, searched=True)]
    carrying = [one for one in started if one.room >= asked.requests]
    return min(carrying, key=lambda one: (one.devices, -one.room), default=None)


def _choice(asked: Asked, attempt: Attempt) -> Choice:
    model, serves = asked.checkpoint.model, attempt.room >= asked.requests
    split = Split(
        next(one for one in devices.devices() if one.name == asked.device.name),
        attempt.tensor_parallel_size,
        attempt.pipeline_parallel_size,
        attempt.data_parallel_size,
        expert_parallel=attempt.enable_expert_parallel,
        fullest=max(map(int, attempt.partition.split(","))) if attempt.partition else 0,
    )
    slots = Slots(attempt.slots, asked.link) if attempt.slots else None
    at_once = min(asked.requests, attempt.room)
    parts, alone = (_step(model, split, slots, count) for count in (at_once, 1))
    return Choice(
        attempt,
        serves,
        step.tokens_per_second(model, split, at_once, step.total(parts)),
        step.tokens_per_second(model, split, 1, step.total(alone)),
        max(parts, key=lambda part: part.milliseconds.slow),
        _first_token(asked, attempt, split, slots),
        host_experts.read(model, split, slots) if slots else NOTHING,
    )


def _step(
    model: Shapes, split: Split, slots: Slots | None, requests: int
) -> list[Part]:
    """The parts of a decode step of a server that has so many requests."""
    together = step.together(split, requests)
    parts = step.decode(model, split, together, WITHOUT)
    if slots:
        parts.append(host_experts.fetched(model, split, slots, together))
    return parts


def _first_token(
    asked: Asked, attempt: Attempt, split: Split, slots: Slots | None
) -> dict[int, Range]:
    """Seconds, by tokens of the prompt."""
    model, own = asked.checkpoint.model, attempt.partition
    sizes = (
        tuple(map(int, own.split(",")))
        if own
        else splits.even(model.layers, split.stages)
    )
    chunk = attempt.max_num_batched_tokens
    return {
        length: prompts.first_token(model, split, sizes, length, chunk, slots).times(
            1e-3
        )
        for length in sorted({min(length, asked.context) for length in PROMPTS})
    }


def refusals(
    asked: Asked, trial: Trial, chosen: Iterable[Choice]
) -> list[tuple[str, str]]:
    """Splits that do not start, with the reason: first what matters first. That is what
    lacks least memory, then what the release refuses, then what cannot be."""
    started = {choice.attempt.name for choice in chosen}
    last = {
        one.name: one
        for one in trial.attempts
        if one.name not in started and not one.searched
    }
    ordered = sorted(
        last.values(),
        key=lambda one: (
            not one.moe_expert_cache_size,
            not one.built,
            missing(asked, one),
        ),
    )
    each = asked.count // asked.replicas
    found = {one.name: why(asked, one) for one in ordered}
    if trial.refused:
        found["any split"] = trial.refused
    return [*found.items(), *splits.impossible(asked.checkpoint, each).items()]


def pinned_bytes(attempt: Attempt) -> int:
    """What all ranks pin in the memory of their host."""
    return attempt.ranks * sum(stage.pinned for stage in attempt.stages)


def missing(asked: Asked, attempt: Attempt) -> float:
    """GiB that a rank lacks for its weights and activations; 0 if those fit."""
    if not attempt.built:
        return 0.0
    needed = attempt.fullest.held + attempt.fullest.set_aside
    return max(0.0, (needed - asked.usable()) / GIB)


def why(asked: Asked, attempt: Attempt) -> str:
    """Why a split does not start, in one line."""
    if lacks := missing(asked, attempt):
        held = attempt.fullest.held / GIB
        aside = attempt.fullest.set_aside / GIB
        pinned = pinned_bytes(attempt) / GIB
        return (
            f"{lacks:.1f} GiB short on a device: weights and buffers {held:.1f},"
            f" activations {aside:.3g}, usable {asked.usable() / GIB:.1f}"
            + (f"; the host pins {pinned:.0f} besides" if pinned else "")
        )
    return " ".join(attempt.refused.split()) or "no request of this context fits"


def nothing_fits(asked: Asked, release: Release, trial: Trial) -> CheckFailed:
    """The error if no split starts, with every reason, and the fewest devices that
    would do."""
    detail = [f"{name}: {reason}" for name, reason in refusals(asked, trial, ())]
    lacking = any(missing(asked, one) for one in trial.attempts if not one.searched)
    newer = Version(release.version) >= Version(HOST_SINCE)
    if lacking and newer and asked.count <= FEW and not asked.host:
        groups = asked.checkpoint.model.stored()
        size = sum(one.count * one.size for one in groups if one.part == "experts")
        detail.append(
            f"with experts in the host's memory, where they take {size / GIB:.0f} GiB:"
            " --host-memory GIB"
        )
    return CheckFailed(
        f"{asked.checkpoint.label} starts on no split of {asked.count:,}"
        f" {asked.device.name}",
        release=release.name,
        detail=detail,
        hint=_instead(asked, release, trial),
    )


def _instead(asked: Asked, release: Release, trial: Trial) -> str:
    """The command with the fewest devices that carry the load; where the search started
    none, by arithmetic alone."""
    if trial.refused:
        return f"the whole checkpoint in {asked.checkpoint.folder}, then the same again"
    if (more := _host_needed(trial)) > asked.host:
        return " ".join(words(replace(asked, host=more), release.name, asked.count))
    if found := fewest(asked, trial):
        return " ".join(words(asked, release.name, found.devices))
    if trial.attempts and not any(one.built for one in trial.attempts):
        return "another release, model or option: docs/deploying.md, Serve"
    promised = next(splits.fewest(asked), None)
    if promised is None or any(one.searched for one in trial.attempts):
        return "another device, fewer requests or a shorter context: docs/deploying.md"
    return " ".join(words(asked, release.name, promised[0]))


def _host_needed(trial: Trial) -> int:
    """GiB of the host's memory with which a split with experts there would start; 0 if
    none lacks any."""
    needed = [
        math.ceil(float(found[1]))
        for one in trial.attempts
        if (found := HOST_NEEDED.search(one.refused))
    ]
    return min(needed, default=0)


HOST_NEEDED = re.compile(r"experts need ([\d.]+) GiB of host memory")
"""How the release refuses."""


def words(asked: Asked, release: str, count: int) -> list[str]:
    """The command line of this plan for so many devices."""
    found = [
        *("xpustack", "plan", release),
        *("--model", str(asked.checkpoint.name or asked.checkpoint.folder)),
        *("--device", short(asked.device), "--count", str(count)),
    ]
    known: Mapping[str, tuple[object, object]] = {
        "--context": (asked.context, CONTEXT),
        "--concurrency": (asked.requests, CONCURRENCY),
        "--data-parallel-size": (asked.replicas, 1),
        "--gpu-memory-utilization": (asked.share, SHARE),
        "--host-memory": (asked.host, 0),
        "--link": (asked.link, LINK),
    }
    for option, (value, default) in known.items():
        found += [option, str(value)] if value != default else []
    found += ["--enable-expert-parallel"] if asked.expert_parallel else []
    if asked.speculation:
        found += ["--speculative-config", json.dumps(asked.speculation)]
    if asked.images:
        found += ["--limit-mm-per-prompt", json.dumps({"image": asked.images})]
    return [shlex.quote(word) for word in found]


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
    if attempt.moe_expert_cache_size:
        found.append("--moe-expert-cache-size auto")
    found += [
        "--kv-cache-dtype fp8",
        f"--block-size {architecture.block_size}",
        f"--max-model-len {asked.context}",
        f"--max-num-batched-tokens {attempt.max_num_batched_tokens}",
        f"--gpu-memory-utilization {asked.share}",
    ]
    if attempt.moe_expert_cache_size or asked.of_a_replica > MANY_REQUESTS:
        found.append(f"--max-num-seqs {asked.of_a_replica}")
    if architecture.images:
        images = json.dumps({"image": asked.images})
        found.append(f"--limit-mm-per-prompt {shlex.quote(images)}")
    if asked.speculation:
        drafts = json.dumps(asked.speculation)
        found.append(f"--speculative-config {shlex.quote(drafts)}")
    return [
        *found,
        f"--reasoning-parser {architecture.parser}",
        f"--tool-call-parser {architecture.parser}",
        "--enable-auto-tool-choice",
    ]


def serve(asked: Asked, attempt: Attempt) -> str:
    """The command, as docs/deploying.md recommends it."""
    begin = ["VLLM_WORKER_MULTIPROC_METHOD=spawn vllm serve"]
    if attempt.partition:
        begin.insert(0, _partition(attempt))
    begin.append(shlex.quote(str(asked.checkpoint.folder)))
    return " ".join([*begin, *arguments(asked, attempt)])


def _partition(attempt: Attempt) -> str:
    return f"VLLM_PP_LAYER_PARTITION={attempt.partition}"


def image(release: Release) -> str:
    """The commands that make the image; docs/deploying.md for podman."""
    folder = f"dist/{release.name}"
    own = Version(release.version).release[:2] < OFFICIAL_SINCE
    file = "Containerfile" if own else "official.Containerfile"
    return (
        f"xpustack build {release.name} && docker build --file {folder}/{file}"
        f" --tag {IMAGE}:{release.version} {folder}"
    )


def container(asked: Asked, attempt: Attempt, release: Release) -> str:
    """The same in the image of `image`."""
    volume = shlex.quote(f"{asked.checkpoint.folder}:/model:ro")
    return " ".join(
        [
            "docker run --rm --device /dev/dri",
            '--group-add "$(stat -c %g /dev/dri/renderD128)"',
            "--ipc host --env VLLM_API_KEY --publish 127.0.0.1:8000:8000",
            f"--stop-timeout 30 --volume {volume}",
            *([f"--env {_partition(attempt)}"] if attempt.partition else []),
            f"{IMAGE}:{release.version} /model",
            *arguments(asked, attempt),
        ]
    )
