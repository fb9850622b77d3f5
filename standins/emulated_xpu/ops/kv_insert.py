# SPDX-License-Identifier: Apache-2.0
"""Query norm and RoPE with the key's insert, of vllm-xpu-kernels 0.1.11 and later.

Semantics are those of `csrc/xpu/sycl/deepseek_qnorm_rope_kv_insert.cpp`, whose file is
the same from 0.1.11 to 0.1.13.1. Where its kernel would read or write foreign memory,
this fails.
"""

import torch

from standins.emulated_xpu.pages import all_bytes, entry_places
from standins.emulated_xpu.wheel.formats import (
    e4m3_codes_without_subnormals,
    next_power_of_two,
    quotient,
)
from standins.emulated_xpu.wheel.implementations import implements

NOPE, ROPE, BLOCK = 448, 64, 64
LARGEST = 448.0


@implements("_xpu_C::deepseek_qnorm_rope_kv_insert")
def deepseek_qnorm_rope_kv_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    position_ids: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    eps: float,
    block_size: int,
    kv_cache_dtype: str,
) -> None:
    """Norm and rotate `q`, `[T, H, 512]`, in place; rotate `kv`, `[T, 512]`, and write
    it into the pages of its slots. A negative slot writes nothing.

    Raises:
        NotImplementedError: bf16 pages.
        IndexError: a token without a slot, or a slot or a position beyond the memory.
        ValueError: the kernel refuses such arguments.
    """
    if kv_cache_dtype != "fp8_ds_mla":
        raise NotImplementedError(f"deepseek_qnorm_rope_kv_insert to {kv_cache_dtype}")
    if {slot_mapping.dtype, position_ids.dtype} != {torch.int64}:
        raise ValueError("deepseek_qnorm_rope_kv_insert: slots and positions in int64")
    if cos_sin_cache.dtype != torch.float32:
        raise ValueError("deepseek_qnorm_rope_kv_insert: the table must be fp32")
    tokens = len(q)
    if min(len(slot_mapping), len(position_ids), len(kv)) < tokens:
        raise IndexError("deepseek_qnorm_rope_kv_insert: each token needs kv and slot")
    slots = slot_mapping[:tokens]
    if tokens and int(slots.max()) >= len(cache) * block_size:
        raise IndexError("deepseek_qnorm_rope_kv_insert: a slot beyond the cache")
    table = cos_sin_cache[position_ids[:tokens]]
    q.copy_(normalized_and_rotated(q, table, eps))
    valid = slots >= 0
    data, scales = entry_bytes(kv[:tokens][valid], table[valid])
    _write(cache, slots[valid], block_size, data, scales)


def normalized_and_rotated(
    q: torch.Tensor, table: torch.Tensor, eps: float
) -> torch.Tensor:
    """The queries `[T, H, 512]` after norm and RoPE, fp32; `table` has their rows."""
    mean = q.float().square().sum(-1, keepdim=True) / q.shape[-1] + eps
    # torch's square root in fp32 is off by one ulp for some numbers.
    root = mean.double().sqrt().float()
    return _rotated(q.float() * (1 / root), table[:, None])


def entry_bytes(
    kv: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Data `[T, 576]` and scales `[T, 8]` of the entries of `kv`, `[T, 512]`."""
    rows = _rotated(kv.float(), table)
    blocks = kv[:, :NOPE].float().unflatten(-1, (-1, BLOCK))
    scales = next_power_of_two(quotient(blocks.abs().amax(-1).clamp(1e-4), LARGEST))
    codes = e4m3_codes_without_subnormals(blocks, scales[..., None]).flatten(1)
    rope = rows[:, NOPE:].to(torch.bfloat16).view(torch.uint8)
    exponents = (scales.view(torch.int32) >> 23).to(torch.uint8)
    return torch.cat((codes, rope), 1), torch.nn.functional.pad(exponents, (0, 1))


def _rotated(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    cos, sin = table.chunk(2, dim=-1)
    plain, rope = x.split([NOPE, ROPE], dim=-1)
    even, odd = rope[..., ::2], rope[..., 1::2]
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return torch.cat((plain, pairs.flatten(-2)), dim=-1)


def _write(
    cache: torch.Tensor,
    slots: torch.Tensor,
    block_size: int,
    data: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """Pages lie as far apart as the cache's first stride says, whatever its shape."""
    page, token = slots // block_size, slots % block_size
    start = cache.storage_offset() + page * cache.stride(0)
    places = entry_places(start, token, block_size, data.shape[1], scales.shape[1])
    memory = all_bytes(cache)
    for part, place in zip((data, scales), places, strict=True):
        memory[place] = part
