# SPDX-License-Identifier: Apache-2.0
"""`xpustack plan`: what a model takes on devices, before anything is downloaded."""

from xpustack.base import releases
from xpustack.terminal.console import Count, Reply, working


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
    answer: Reply,
) -> None:
    """Say how to split a model over devices, and the command that serves it.

    The release's own engine starts every split, with its real model class, on no device
    and without values: what would fail at start fails here. GiB are of one device, of
    the stage that holds most.

    Args:
        release: Such as v0.33.0.
        model: flash, pro, v4.1, or the folder of a checkpoint.
        device: Such as b60.
        count: Devices; of a Max 1550, its stacks.
        context: Tokens of a request, its answer included.
        concurrency: Requests at the same time.
        data_parallel_size: Replicas, which share the experts.
        enable_expert_parallel: Whole experts on a rank.
    """
    # The planner is no part of the installed tool.
    import planner.choices as choices
    import planner.report as report
    import planner.trial as trial
    from planner.asked import Asked, checkpoint
    from planner.asked import device as device_called

    with working() as (project, cache):
        pinned = releases.load(project)[release]
        asked = Asked(
            checkpoint(model),
            device_called(device),
            count,
            context,
            concurrency,
            data_parallel_size,
            enable_expert_parallel,
        )
        tried = trial.run(project, cache, pinned, asked)
    found = choices.choices(asked, tried)
    answer.data = data = report.to_json(asked, pinned, tried, found)
    if not found:
        raise choices.nothing_fits(asked, pinned, choices.refusals(tried, found))
    answer.say(report.title(data))
    answer.table(report.rows(data), report.COLUMNS)
    answer.say(*report.notes(data))
