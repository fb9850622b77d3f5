# SPDX-License-Identifier: Apache-2.0
"""FP8 KV pages for tests: known tokens inside pages whose every other byte is 0xFF."""

import functools

import torch

TOKEN = 576
WIDTH = 584


def empty_pages(
    blocks: int, block_size: int, device: torch.device, extra: int = 0
) -> torch.Tensor:
    """Pages of 0xFF bytes (NaN as bf16) with the stride padded to 576 + `extra`."""
    stride = -(-block_size * WIDTH // TOKEN) * TOKEN + extra
    raw = torch.full((blocks * stride,), 0xFF, dtype=torch.uint8, device=device)
    return raw.as_strided((blocks, block_size, WIDTH), (stride, WIDTH, 1))


def write_token(cache: torch.Tensor, slot: int, generator: torch.Generator) -> None:
    """Fill one slot with random codes, exponents and rope of key-like size."""
    block_size = cache.shape[1]
    page = cache[slot // block_size].reshape(-1)
    position = slot % block_size
    values = torch.randn(448, generator=generator) * 64
    codes = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    rope = torch.randn(64, generator=generator).bfloat16().view(torch.uint8)
    exponents = torch.randint(118, 123, (7,), generator=generator, dtype=torch.uint8)
    scales = block_size * TOKEN + position * 8
    for start, part in (
        (position * TOKEN, codes),
        (position * TOKEN + 448, rope),
        (scales, exponents),
    ):
        page[start : start + part.numel()] = part.to(page.device)


def filled_pages(
    blocks: int, block_size: int, seed: int, device: torch.device, extra: int = 0
) -> torch.Tensor:
    """`empty_pages` with every slot written."""
    moved = empty_pages(blocks, block_size, device, extra)
    moved.copy_(_written(blocks, block_size, seed))
    return moved


@functools.lru_cache(32)
def _written(blocks: int, block_size: int, seed: int) -> torch.Tensor:
    """Kept, because many tests ask for the same pages; nobody may write there."""
    cache = empty_pages(blocks, block_size, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for slot in range(blocks * block_size):
        write_token(cache, slot, generator)
    return cache


def sparse_memory(size: int, device: torch.device) -> torch.Tensor:
    """`size` zero bytes; on a CPU the kernel maps them only when they are touched."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    import numpy as np

    return torch.from_numpy(np.zeros(size, dtype=np.uint8))
