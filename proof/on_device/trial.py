# SPDX-License-Identifier: Apache-2.0
"""A kernel that shows whether Triton compiles, loads and launches here."""

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _double(x_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < count, other=0.0)
    tl.store(x_ptr + offs, x + x, mask=offs < count)


def launch(device: torch.device) -> bool:
    """Whether the kernel gave the right numbers."""
    x = torch.arange(100, dtype=torch.float32, device=device)
    expected = 2 * x
    _double[(1,)](x, 100, BLOCK=128)
    return bool(torch.equal(x, expected))
