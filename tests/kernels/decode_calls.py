# SPDX-License-Identifier: Apache-2.0
"""Calls of sparse decode for tests, and what float64 makes of the same arguments."""

import torch
from compare import assert_within
from fp8_pages import filled_pages

from kernels.reference.mla import sparse_decode as reference
from kernels.xpu_dsv4.mla import sparse_decode as decode

SCALE = 512**-0.5
ERROR = 2.0**-8
"""Of rounding probabilities and the result to bf16, twice over: the bound of an element
is this times |o| + sum(p |v|)."""


def use(monkeypatch, **changes):
    """Run with the given fields of the configuration changed."""
    config = decode.decode_config

    def changed(*sizes):
        return config(*sizes)._replace(**changes)

    monkeypatch.setattr(decode, "decode_config", changed)


def batch(tokens, heads, topk, window, device, seed=0, blocks=(3, 64, 2, 64)):
    """Arguments of a decode by name; all lengths are full and all slots valid."""
    torch.manual_seed(seed)
    kv_blocks, kv_size, swa_blocks, swa_size = blocks
    q = torch.randn(tokens, heads, 512).bfloat16().to(device)

    def slots(width, count):
        return torch.randint(0, count, (tokens, width), dtype=torch.int32).to(device)

    def lens(width):
        return torch.full((tokens,), width, dtype=torch.int32, device=device)

    return {
        "q": q,
        "kv_cache": filled_pages(kv_blocks, kv_size, 1, device) if topk else None,
        "swa_kv_cache": filled_pages(swa_blocks, swa_size, 2, device),
        "swa_only": topk == 0,
        "topk_indices": slots(topk, kv_blocks * kv_size) if topk else None,
        "topk_lens": lens(topk) if topk else None,
        "swa_indices": slots(window, swa_blocks * swa_size),
        "swa_lens": lens(window),
        "attn_sink": (torch.randn(heads) * 2).to(device),
        "softmax_scale": SCALE,
        "head_dim": 512,
        "nope_head_dim": 448,
        "rope_head_dim": 64,
        "out": torch.empty_like(q),
    }


def expected_of(arguments):
    """The reference's output, magnitude and log of the sum, of the same arguments."""
    host = {
        name: value.cpu() if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    out, size = (torch.empty(host["q"].shape, dtype=torch.float64) for _ in range(2))
    lse = torch.empty(host["q"].shape[:2], dtype=torch.float64)
    reference.xpu_sparse_decode_fp8(**{**host, "out": out}, magnitude=size, lse=lse)
    return out, size, lse


def check(arguments, workspace=None):
    decode.xpu_sparse_decode_fp8(**arguments, workspace=workspace)
    actual = arguments["out"].cpu().clone()
    expected, size, _ = expected_of(arguments)
    assert_within(actual, expected, ERROR * (expected.abs() + size))
    return actual
