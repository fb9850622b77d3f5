# SPDX-License-Identifier: Apache-2.0
"""`xpustack plan`: what a model takes on devices, before anything is downloaded."""

from stack.base import releases
from stack.terminal.console import Amount, Count, Reply, Share, working


def plan(
    release: str,
    /,
    *,
    model: str,
    device: str,
    count: Count,
    context: Count = 131_072,
    concurrency: Count = 16,
    data_parallel_size: Count = 1,
    enable_expert_parallel: bool = False,
    gpu_memory_utilization: Share = 0.9,
    speculative_config: str = "",
    limit_mm_per_prompt: str = "",
    host_memory: Amount = 0,
    link: Count = 28,
    answer: Reply,
) -> None:
    """Say how to split a model over devices, and the command that serves it.

    The release's own engine starts every split, with its real model class, on no device
    and without values: what would fail at start fails here. GiB are of one device, of
    the stage that holds most. The fewest devices that carry the load are searched, too.

    Args:
        release: Such as v0.33.0.
        model: flash, pro, vision, v4.1, or a folder with config.json, with or without
            the checkpoint's other files.
        device: Such as b60.
        count: Devices; of a Max 1550, its stacks.
        context: Tokens of a request, its answer included.
        concurrency: Requests at the same time.
        data_parallel_size: Replicas, which share the experts.
        enable_expert_parallel: Whole experts on a rank.
        gpu_memory_utilization: Of a device's memory, what vLLM may use.
        speculative_config: Drafts, as vLLM has it: JSON with method and
            num_speculative_tokens.
        limit_mm_per_prompt: Images of a prompt, as vLLM has it: JSON with image; none
            by default.
        host_memory: GiB of the host that experts may take; else all are on the devices.
        link: Gigabytes per second from the host to a device.
    """
    import lab.planner.asked as asking
    import lab.planner.choices as choices
    import lab.planner.report as report
    import lab.planner.trial as trial
    from lab.planner.checkpoints import checkpoint

    with working() as (project, cache):
        pinned = releases.load(project)[release]
        asked = asking.Asked(
            checkpoint(model),
            asking.device(device),
            count,
            context,
            concurrency,
            data_parallel_size,
            enable_expert_parallel,
            gpu_memory_utilization,
            asking.speculation(speculative_config) if speculative_config else {},
            asking.images(limit_mm_per_prompt) if limit_mm_per_prompt else 0,
            host_memory,
            link,
        )
        tried = trial.run(project, cache, pinned, asked)
    found = choices.choices(asked, tried)
    answer.data = data = report.to_json(asked, pinned, tried, found)
    if not found:
        raise choices.nothing_fits(asked, pinned, tried)
    answer.say(report.title(data))
    answer.table(report.rows(data), report.columns(data))
    answer.say(*report.notes(data))
