# SPDX-License-Identifier: Apache-2.0
"""`xpustack plan`: what a model takes on devices, before anything is downloaded."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from xpustack.base import releases
from xpustack.terminal.console import AsJson, answering, working

if TYPE_CHECKING:
    from xpustack.plan.asked import Asked
    from xpustack.plan.choices import Choice

GIB = 1 << 30
NOTES = (
    "weights, buffers: GiB of the fullest device. requests: of the whole context,"
    " beside a chunk that is read. host: GiB of all processes, on a CPU. pinned: GiB of"
    " the host that devices read (Engram), for all ranks, in powers of two.",
    "tokens/s: modelled by aot/step.py, not measured, with captured graphs, without"
    " attention and the indexer's scores. Overlapping ranges rank nothing for sure.",
)
COLUMNS = (
    *("split", "weights", "buffers", "requests", "cache tokens", "chunk"),
    *("host", "pinned", "tokens/s", "limit"),
)


def plan(
    release: Annotated[str, typer.Argument(help="Such as v0.33.0.")],
    model: Annotated[
        str, typer.Option(help="flash, pro, v4.1, or the folder of a checkpoint.")
    ],
    device: Annotated[str, typer.Option(help="Such as b60.")],
    count: Annotated[
        int, typer.Option(min=1, help="Devices; of a Max 1550, its stacks.")
    ],
    context: Annotated[
        int, typer.Option(min=1, help="Tokens of a request, its answer included.")
    ] = 131_072,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Requests at the same time.")
    ] = 16,
    data_parallel_size: Annotated[
        int, typer.Option(min=1, help="Replicas, which share the experts.")
    ] = 1,
    enable_expert_parallel: Annotated[
        bool, typer.Option(help="Whole experts on a rank.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say how to split a model over devices, and the command that serves it.

    The release's own engine starts every split, with its real model class, on no device
    and without values: what would fail at start fails here. GiB are of one device, of
    the stage that holds most."""
    with answering("plan", as_json) as answer:
        # The arithmetic is no part of the installed tool.
        from xpustack.plan import asked as asking
        from xpustack.plan import choices, trial

        with working() as (project, cache):
            pinned = releases.load(project)[release]
            asked = asking.Asked(
                asking.checkpoint(model),
                asking.device(device),
                count,
                context,
                concurrency,
                data_parallel_size,
                enable_expert_parallel,
            )
            tried = trial.run(project, cache, pinned, asked)
        found = choices.choices(asked, tried)
        refused = choices.refusals(tried, found)
        reasons = {one.name: choices.why(asked, one) for one in refused}
        answer.data = data = {
            "release": pinned.name,
            "model": asked.checkpoint.label,
            "device": asked.device.name,
            "count": count,
            "context": context,
            "concurrency": concurrency,
            "checkpoint_bytes": tried.checkpoint,
            "choices": [_to_json(asked, choice) for choice in found],
            "refused": reasons,
        }
        if not found:
            raise choices.nothing_fits(asked, pinned, refused)
        best = found[0].attempt
        data |= {
            "serve": choices.serve(asked, best),
            "container": choices.container(asked, best, pinned),
        }
        answer.say(
            f"DeepSeek-{asked.checkpoint.label} on {count} {asked.device.name},"
            f" {concurrency} requests of {context:,} tokens, {pinned.name}"
        )
        answer.table((_row(asked, choice) for choice in found), COLUMNS)
        answer.say(*(f"{name} does not start: {why}" for name, why in reasons.items()))
        answer.say(
            *NOTES,
            f"checkpoint: {tried.checkpoint / GIB:.0f} GiB on disk",
            "",
            choices.serve(asked, best),
            "",
            choices.container(asked, best, pinned),
        )


def _row(asked: "Asked", choice: "Choice") -> dict[str, Any]:
    values = _to_json(asked, choice)
    speed = values["tokens_per_second"]
    return {
        "split": values["split"],
        "weights": f"{values['weights_bytes'] / GIB:.1f}",
        "buffers": f"{values['buffers_bytes'] / GIB:.1f}",
        "requests": values["requests"],
        "cache tokens": f"{values['cache_tokens']:,}",
        "chunk": values["chunk"],
        "host": f"{values['host_bytes'] / GIB:.0f}",
        "pinned": f"{values['pinned_bytes'] / GIB:.0f}",
        "tokens/s": "{:.0f} to {:.0f}".format(*speed) if speed else "-",
        "limit": values["limit"],
    }


def _to_json(asked: "Asked", choice: "Choice") -> dict[str, Any]:
    from xpustack.plan import choices

    attempt = choice.attempt
    speed = choice.speed
    return {
        "split": attempt.name,
        "tensor_parallel_size": attempt.tensor_parallel_size,
        "data_parallel_size": attempt.data_parallel_size,
        "pipeline_parallel_size": attempt.pipeline_parallel_size,
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
        "tokens_per_second": sorted((speed.slow, speed.fast)) if speed else None,
        "serves": choice.serves,
        "limit": choice.limit(asked),
    }
