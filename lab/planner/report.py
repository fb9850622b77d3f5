# SPDX-License-Identifier: Apache-2.0
"""What a plan says: as one document, and as lines and a table for people."""

from collections.abc import Iterator, Sequence
from typing import Any

from lab.planner import choices, devices
from lab.planner.asked import Asked
from lab.planner.choices import Choice
from lab.planner.trial import Attempt, Trial
from stack.base.releases import Release

GIB = 1 << 30
NOTES = (
    "weights, buffers: GiB of the fullest device. requests: of the whole context,"
    " beside a chunk that is read. chunk: tokens of a prompt in one step. host: GiB of"
    " all processes, on a CPU. pinned: GiB of the host that devices read (Engram), for"
    " all ranks, in powers of two.",
    "tokens/s: modelled by lab/aot/costs/step.py, not measured, with captured graphs,"
    " without attention and the indexer's scores. Overlapping ranges rank nothing for"
    " sure. of one: a request that comes alone. first token: seconds, of a prompt as"
    " long as the context, at most 131,072 tokens, modelled alike. limit: what bounds"
    " the slowest part of a decode step, and which part that is.",
)
SLOTS = (
    "slots: experts of a layer on each device: what `auto` takes beside the cache of"
    " all requests. All are pinned. In the best split a token reads"
    " {:.2f} to {:.2f} GiB over each link: at best it finds what llama.cpp#27861"
    " measured with another model, at worst what chance gives. Of V4-Flash a user"
    " reports 8 to 18 % with 5 % of the experts (FreeToken#174): nearer to chance."
)
COLUMNS = (
    *("split", "weights", "buffers", "requests", "cache tokens", "chunk", "slots"),
    *("host", "pinned", "tokens/s", "of one", "first token", "limit"),
)


def to_json(
    asked: Asked, release: Release, tried: Trial, found: Sequence[Choice]
) -> dict[str, Any]:
    """The whole plan as plain data."""
    data = {
        "release": release.name,
        "model": asked.checkpoint.label,
        "device": asked.device.name,
        "count": asked.count,
        "context": asked.context,
        "concurrency": asked.requests,
        "checkpoint_bytes": tried.checkpoint,
        "choices": [_choice(asked, choice) for choice in found],
        "refused": dict(choices.refusals(asked, tried, found)),
        "warnings": devices.warnings(asked.device),
        "gpu_memory_utilization": asked.share,
        "speculative_config": dict(asked.speculation),
        "images": asked.images,
        "host_memory": asked.host or "",
        "link": asked.link if asked.host else "",
        "fewest": _fewest(choices.fewest(asked, tried)),
    }
    if found:
        best = found[0].attempt
        data["serve"] = choices.serve(asked, best)
        data["image"] = choices.image(release)
        data["container"] = choices.container(asked, best, release)
    return data


def _fewest(attempt: Attempt | None) -> dict[str, Any] | None:
    if attempt is None:
        return None
    return {
        "count": attempt.devices,
        "split": attempt.name,
        "requests": attempt.room,
        "chunk": attempt.max_num_batched_tokens,
    }


def title(data: dict[str, Any]) -> str:
    """What was asked for, in a line."""
    return (
        f"DeepSeek-{data['model']} on {data['count']} {data['device']},"
        f" {data['concurrency']} requests of {data['context']:,} tokens,"
        f" {data['release']}"
    )


def columns(data: dict[str, Any]) -> list[str]:
    """Those of the table that say something."""
    few = any(values["slots"] for values in data["choices"])
    return [name for name in COLUMNS if few or name != "slots"]


def rows(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The table: one row for each split that starts."""
    for values in data["choices"]:
        speed = values["tokens_per_second"]
        yield {
            "split": values["split"],
            "weights": f"{values['weights_bytes'] / GIB:.1f}",
            "buffers": f"{values['buffers_bytes'] / GIB:.1f}",
            "requests": values["requests"],
            "cache tokens": f"{values['cache_tokens']:,}",
            "chunk": values["chunk"],
            "slots": values["slots"] or "",
            "host": f"{values['host_bytes'] / GIB:.0f}",
            "pinned": f"{values['pinned_bytes'] / GIB:.0f}",
            "tokens/s": "{:.0f} to {:.0f}".format(*speed),
            "of one": "{:.0f} to {:.0f}".format(*values["tokens_per_second_of_one"]),
            "first token": _seconds(values["first_token_seconds"]),
            "limit": values["limit"],
        }


def _seconds(found: dict[str, list[float]]) -> str:
    """Of the longest prompt."""
    *_, (fast, slow) = found.values()
    return f"{fast:.2g} to {slow:.2g}"


def notes(data: dict[str, Any]) -> Iterator[str]:
    """What does not start, how to read the table, and the commands."""
    for name, why in data["refused"].items():
        yield f"{name} does not start: {why}"
    yield from (f"warning: {text}" for text in data["warnings"])
    if fewest := data["fewest"]:
        yield (
            f"fewest devices that carry all requests: {fewest['count']}, as"
            f" {fewest['split']} with room for {fewest['requests']}"
        )
    yield from NOTES
    for values in data["choices"]:
        if values["slots"]:
            yield SLOTS.format(*(of / GIB for of in values["link_bytes_per_token"]))
            break
    yield f"checkpoint: {data['checkpoint_bytes'] / GIB:.0f} GiB on disk"
    yield from ("", data["serve"], "", data["image"], "", data["container"])


def _choice(asked: Asked, choice: Choice) -> dict[str, Any]:
    attempt = choice.attempt
    speed = choice.speed
    return {
        "split": attempt.name,
        "tensor_parallel_size": attempt.tensor_parallel_size,
        "data_parallel_size": attempt.data_parallel_size,
        "pipeline_parallel_size": attempt.pipeline_parallel_size,
        "partition": attempt.partition,
        "expert_parallel": attempt.enable_expert_parallel,
        "weights_bytes": attempt.fullest.weights,
        "buffers_bytes": attempt.fullest.buffers,
        "stages_weights_bytes": [stage.weights for stage in attempt.stages],
        "unset": sorted({name for stage in attempt.stages for name in stage.unset}),
        "requests": attempt.room,
        "cache_tokens": attempt.room * asked.context,
        "chunk": attempt.max_num_batched_tokens,
        "host_bytes": attempt.ranks * sum(stage.host for stage in attempt.stages),
        "pinned_bytes": choices.pinned_bytes(attempt),
        "tokens_per_second": sorted((speed.slow, speed.fast)),
        "tokens_per_second_of_one": sorted((choice.alone.fast, choice.alone.slow)),
        "first_token_seconds": {
            str(length): sorted((time.fast, time.slow))
            for length, time in choice.first_token.items()
        },
        "slots": attempt.slots,
        "link_bytes_per_token": sorted(
            (choice.link_bytes.fast, choice.link_bytes.slow)
        ),
        "serves": choice.serves,
        "limit": choice.limit(asked),
    }
