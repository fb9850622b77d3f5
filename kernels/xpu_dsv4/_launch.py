# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Launch options that differ between Triton back ends, and what block loads need."""

import torch

BLOCK_START, BLOCK_PITCH = 64, 16
"""Bytes of which the start and the pitch of a matrix are multiples, so that 2-dim block
loads can read it."""


def cdiv(x: int, y: int) -> int:
    """`x / y` rounded up, for the host.

    `triton.cdiv` and `triton.next_power_of_2`, which kernels may call as well, take a
    hundred times as long.
    """
    return -(-x // y)


def next_power_of_2(x: int) -> int:
    """The least power of 2 that is at least `x`, which is positive, for the host."""
    return 1 << (x - 1).bit_length()


def launch_options(
    device: torch.device,
    num_warps: int,
    num_stages: int = 1,
    grf: int = 128,
) -> dict[str, int | str]:
    """Options for one kernel launch.

    Args:
        device (torch.device):
            Where the kernel runs. `meta` stands for an XPU when launches are recorded
            for ahead-of-time compilation.
        num_warps (int):
            Warps per program; on XPU, sub-groups of 16 lanes per work-group.
        num_stages (int):
            Depth of software pipelining.
        grf (int):
            Registers per hardware thread on XPU, 128 or 256. Other back ends reject the
            option `grf_mode`, so they do not get it.

    Returns:
        Keyword arguments for `kernel[grid](...)`.

    """
    options: dict[str, int | str] = {"num_warps": num_warps, "num_stages": num_stages}
    if device.type in ("xpu", "meta"):
        options["grf_mode"] = str(grf)
    return options


def has_aligned_rows(q: torch.Tensor) -> bool:
    """Whether 2-dim block loads can read `q`, `[num_tokens, num_heads, dim]`.

    The heads of a token are then rows of a matrix that starts at a multiple of 64
    bytes, with a pitch that is a multiple of 16.
    """
    size = q.element_size()
    return not (
        q.data_ptr() % BLOCK_START
        or q.stride(0) * size % BLOCK_START
        or q.stride(1) * size % BLOCK_PITCH
    )


def has_packed_rows(rows: torch.Tensor) -> bool:
    """Whether `rows`, `[num_rows, 1, dim]`, has no gaps, and starts at a multiple of 16
    bytes."""
    return rows.stride(0) == rows.shape[-1] and rows.data_ptr() % 16 == 0
