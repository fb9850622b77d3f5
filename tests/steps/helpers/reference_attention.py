# SPDX-License-Identifier: Apache-2.0
"""Sparse attention over FP8 pages in float64, one token at a time.

Independent of any kernel: it knows a page's layout, which tokens a token sees, and
the softmax with a sink of OpenAI's gpt-oss and FlashMLA's tests.
"""

from collections.abc import Sequence

import torch

NOPE, ROPE = 448, 64
HEAD_DIM = NOPE + ROPE
BLOCK = 64
TOKEN_BYTES = NOPE + 2 * ROPE
SCALE_BYTES = 8


def random_pages(
    num_blocks: int, block_size: int, page_bytes: int, generator: torch.Generator
) -> torch.Tensor:
    """Normal keys as FP8 pages, `[num_blocks, block_size, 584]` uint8.

    A page is `block_size` times 448 e4m3 and 64 bf16 values, then 8 bytes per token
    with the UE8M0 exponents of its seven 64-wide blocks, then padding to `page_bytes`.
    """
    keys = torch.randn(num_blocks, block_size, HEAD_DIM, generator=generator)
    blocks = keys[..., :NOPE].unflatten(-1, (-1, BLOCK))
    exponents = (blocks.abs().amax(-1) / 448).log2().ceil()
    codes = (blocks / exponents.exp2()[..., None]).to(torch.float8_e4m3fn)
    pages = torch.zeros(num_blocks, page_bytes, dtype=torch.uint8)
    data = pages[:, : block_size * TOKEN_BYTES].unflatten(1, (block_size, -1))
    data[..., :NOPE] = codes.flatten(-2).view(torch.uint8)
    data[..., NOPE:] = keys[..., NOPE:].to(torch.bfloat16).view(torch.uint8)
    scales = pages[:, block_size * TOKEN_BYTES :][:, : block_size * SCALE_BYTES]
    scales.unflatten(1, (block_size, -1))[..., :7] = (exponents + 127).to(torch.uint8)
    return as_cache(pages, block_size)


def as_cache(pages: torch.Tensor, block_size: int) -> torch.Tensor:
    """`[num_blocks, page bytes]` as vLLM binds it: 584 bytes per token, padded."""
    width = TOKEN_BYTES + SCALE_BYTES
    shape = (len(pages), block_size, width)
    return pages.as_strided(shape, (pages.stride(0), width, 1))


def entries(
    cache: torch.Tensor, blocks: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """The values of tokens in their pages, `[tokens, 512]` float64."""
    block_size = cache.shape[1]
    pages = cache.as_strided((len(cache), cache[0].numel()), (cache.stride(0), 1))

    def taken(start: int, size: int) -> torch.Tensor:
        columns = (start + positions * size)[:, None] + torch.arange(size)
        return pages[blocks[:, None], columns]

    data = taken(0, TOKEN_BYTES)
    scales = taken(block_size * TOKEN_BYTES, SCALE_BYTES)[:, :7]
    nope = data[:, :NOPE].contiguous().view(torch.float8_e4m3fn).double()
    scale = (scales.double() - 127).exp2().repeat_interleave(BLOCK, -1)
    rope = data[:, NOPE:].contiguous().view(torch.bfloat16).double()
    return torch.cat((nope * scale, rope), -1)


def read(cache: torch.Tensor, block: int, position: int) -> torch.Tensor:
    """The 512 values of one token of a page, float64."""
    return entries(cache, torch.tensor([block]), torch.tensor([position]))[0]


def gather(
    cache: torch.Tensor, block_table: torch.Tensor, positions: Sequence[int]
) -> torch.Tensor:
    """The entries at `positions` of a request, `[len(positions), 512]` float64."""
    block_size, places = cache.shape[1], torch.tensor(positions, dtype=torch.int64)
    return entries(cache, block_table[places // block_size], places % block_size)


def attend(
    query: torch.Tensor, keys: torch.Tensor, sink: torch.Tensor, scale: float
) -> torch.Tensor:
    """Per head sum(exp(s) k) / (sum(exp(s)) + exp(sink)), s = scale q.k; 0 if no keys.

    Args:
        query: `[heads, 512]`.
        keys: `[keys, 512]`, which are the values too.
        sink: `[heads]` in natural-log units; -inf for none.
        scale: factor of the scores.
    """
    if not len(keys):
        return torch.zeros_like(query, dtype=torch.float64)
    score = scale * query.double() @ keys.T
    total = torch.logsumexp(torch.cat((score, sink.double()[:, None]), 1), 1)
    return (score - total[:, None]).exp() @ keys


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    difference = (actual.double().cpu() - expected).norm()
    return (difference / expected.norm().clamp_min(1e-30)).item()


def rotate(values: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Interleaved RoPE on the last 64 of `[..., 512]`; `cos_sin` is 32 | 32."""
    cos, sin = cos_sin.double().chunk(2, dim=-1)
    even, odd = values[..., NOPE::2].double(), values[..., NOPE + 1 :: 2].double()
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return torch.cat((values[..., :NOPE].double(), turned.flatten(-2)), dim=-1)


def normalize(values: torch.Tensor, eps: float) -> torch.Tensor:
    """Values over their root mean square, without a weight, float64."""
    values = values.double()
    return values * (values.square().mean(-1, keepdim=True) + eps).rsqrt()


def quantize(values: torch.Tensor) -> torch.Tensor:
    """The values that a page returns for stored `[..., 512]`: blocks of 64 in e4m3
    under a power of two, the last 64 in bf16."""
    blocks = values[..., :NOPE].unflatten(-1, (-1, BLOCK)).double()
    exponents = (blocks.abs().amax(-1).clamp_min(1e-4) / 448).log2().ceil()
    scale = exponents.exp2()[..., None]
    codes = (blocks / scale).float().to(torch.float8_e4m3fn).double()
    rope = values[..., NOPE:].to(torch.bfloat16).double()
    return torch.cat(((codes * scale).flatten(-2), rope), dim=-1)
