# SPDX-License-Identifier: Apache-2.0
"""The values that sparse decode reads from a page: each code under each exponent."""

import torch
from decode_calls import batch
from fp8_pages import TOKEN, empty_pages

from kernels.xpu_dsv4.mla import sparse_decode as decode

EXPONENTS = 135
"""Of a page: at most 134."""
ROPE = torch.linspace(-3, 3, 64).bfloat16()


def read_keys(
    codes: torch.Tensor, exponents: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """What decode reads of keys with these bytes, in float64.

    A token with one key and q = 0 attends to that key alone, with weight 1.

    Args:
        codes: uint8 e4m3 codes of each key, `[448]` or `[N, 448]`.
        exponents: biased exponents of the blocks, `[N, 7]`.
        device: where decode runs.

    Returns:
        Values of the keys, `[N, 512]`; the last 64 are `ROPE`.
    """
    count = exponents.shape[0]
    page = torch.zeros(1, count * 584, dtype=torch.uint8)
    data = page[:, : count * TOKEN].view(count, TOKEN)
    scales = page[:, count * TOKEN :].view(count, 8)
    data[:, :448] = codes
    data[:, 448:] = ROPE.view(torch.uint8)
    scales[:, :7] = exponents.to(torch.uint8)
    cache = empty_pages(1, count, device)
    cache.view(-1)[: page.numel()].copy_(page.view(-1))
    arguments = batch(count, 1, 0, 1, device, blocks=(1, 1, 1, count))
    arguments["q"].zero_()
    arguments["swa_kv_cache"] = cache
    arguments["swa_indices"].copy_(torch.arange(count)[:, None])
    arguments["attn_sink"] = None
    decode.xpu_sparse_decode_fp8(**arguments)
    return arguments["out"].double().cpu()[:, 0]


def test_each_code_under_each_exponent_is_exact(device):
    """A result below the normal numbers of bf16 may be flushed to 0."""
    finite = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F]).to(torch.uint8)
    codes = finite.repeat(2)[:448]  # [448]
    # Blocks of a token differ, so that none takes its neighbour's exponent.
    exponents = (torch.arange(EXPONENTS)[:, None] + 17 * torch.arange(7)) % EXPONENTS
    actual = read_keys(codes, exponents, device)  # [135, 512]
    values = codes.view(torch.float8_e4m3fn).double()  # [448]
    powers = 2.0 ** (exponents.double() - 127)  # [135, 7]
    expected = values * powers.repeat_interleave(64, 1)  # [135, 448]
    expected = torch.cat([expected, ROPE.double().expand(EXPONENTS, 64)], 1)
    normal = expected.abs() >= 2.0**-126
    assert torch.equal(actual[normal], expected[normal])
    assert bool((actual[~normal].abs() <= 2.0**-126).all())


def test_corrupt_bytes_read_as_the_page_layout_says(device):
    """Exponents that no page has poison a token; codes of NaN are numbers."""
    codes = torch.full((5, 448), 0x38, dtype=torch.uint8)  # 1.0
    codes[0, 5], codes[0, 70], codes[1, 300] = 0x7F, 0xFF, 0x7F
    exponents = torch.full((5, 7), 125)  # 2^-2
    exponents[2, 0], exponents[3, 3], exponents[4, 6] = 135, 200, 255
    actual = read_keys(codes, exponents, device)  # [5, 512]
    assert not actual[2:].isfinite().any()
    expected = torch.cat([torch.full((448,), 0.25, dtype=torch.float64), ROPE.double()])
    expected = expected.repeat(2, 1)  # [2, 512]
    expected[0, 5], expected[0, 70], expected[1, 300] = 120.0, -120.0, 120.0
    assert torch.equal(actual[:2], expected)
