# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Launch options that differ between Triton back ends."""

import torch


def launch_options(
    device: torch.device,
    num_warps: int,
    num_stages: int = 1,
    grf: int = 128,
) -> dict[str, int | str]:
    """Options for one kernel launch.

    Args:
        device: where the kernel runs; `meta` stands for an XPU at compile time.
        num_warps: sub-groups of 16 lanes a work-group on XPU.
        num_stages: software pipelining depth.
        grf: registers a hardware thread, 128 or 256. Only Intel has the choice.

    Returns:
        Keyword arguments for `kernel[grid](...)`.

    """
    options: dict[str, int | str] = {"num_warps": num_warps, "num_stages": num_stages}
    if device.type in ("xpu", "meta"):
        options["grf_mode"] = str(grf)
    return options
