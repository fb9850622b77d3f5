# SPDX-License-Identifier: Apache-2.0
"""The values that sparse decode reads from a page: each code under each exponent."""

import torch
from decode_calls import batch
from fp8_pages import TOKEN, empty_pages

from kernels.xpu_dsv4 import sparse_decode as decode

EXPONENTS = 135
"""Of a page: at most 134."""


def test_each_code_under_each_exponent_is_exact(tuned_for, device):
    """A token with one key and q = 0 attends to that key alone, with weight 1.

    A result below the normal numbers of bf16 may be flushed to 0.
    """
    finite = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F]).to(torch.uint8)
    rope = torch.linspace(-3, 3, 64).bfloat16()
    page = torch.zeros(1, EXPONENTS * 584, dtype=torch.uint8)
    data = page[:, : EXPONENTS * TOKEN].view(EXPONENTS, TOKEN)
    scales = page[:, EXPONENTS * TOKEN :].view(EXPONENTS, 8)
    codes = finite.repeat(2)[:448]  # [448]
    data[:, :448] = codes
    data[:, 448:] = rope.view(torch.uint8)
    # Blocks of a token differ, so that none takes its neighbour's exponent.
    exponents = (torch.arange(EXPONENTS)[:, None] + 17 * torch.arange(7)) % EXPONENTS
    scales[:, :7] = exponents.to(torch.uint8)
    cache = empty_pages(1, EXPONENTS, device)
    cache.view(-1)[: page.numel()].copy_(page.view(-1))
    arguments = batch(EXPONENTS, 1, 0, 1, device, blocks=(1, 1, 1, EXPONENTS))
    arguments["q"].zero_()
    arguments["swa_kv_cache"] = cache
    arguments["swa_indices"].copy_(torch.arange(EXPONENTS)[:, None])
    arguments["attn_sink"] = None
    decode.xpu_sparse_decode_fp8(**arguments)
    actual = arguments["out"].double().cpu()[:, 0]  # [135, 512]
    values = codes.view(torch.float8_e4m3fn).double()  # [448]
    powers = 2.0 ** (exponents.double() - 127)  # [135, 7]
    expected = values * powers.repeat_interleave(64, 1)  # [135, 448]
    expected = torch.cat([expected, rope.double().expand(EXPONENTS, 64)], 1)
    normal = expected.abs() >= 2.0**-126
    assert torch.equal(actual[normal], expected[normal])
    assert bool((actual[~normal].abs() <= 2.0**-126).all())
