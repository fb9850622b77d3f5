# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4's shapes, and `meta` tensors of them.

Flash has 64 attention heads and hidden size 4096, Pro 128 and 7168. Of what a kernel
sees, tensor parallelism of 1, 2, 4 or 8 divides only the heads.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

HEAD_DIM = 512
ROPE_DIM = 64
WINDOW = 128
GROUP_HEADS = 8
"""Heads of one group of the output projection; a rank holds whole groups."""
INDEX_HEADS, INDEX_DIM = 64, 128
CONTEXT = 1 << 20
PAGE_BYTES = {2: 1728, 32: 19008, 64: 37440, 256: 149760}
"""Tokens per page → bytes from one page to the next: 584 per token, padded."""
PACKAGE = "kernels.xpu_dsv4"

bf16, f32, u8 = torch.bfloat16, torch.float32, torch.uint8
i32, i64, fp8 = torch.int32, torch.int64, torch.float8_e4m3fn


@dataclass(frozen=True)
class Model:
    """What a kernel's shape depends on.

    Attributes:
        name: of the model.
        heads: attention heads.
        hidden: hidden size.
        topk: compressed entries that the indexer selects per token.
        groups: output projection groups.
    """

    name: str
    heads: int
    hidden: int
    topk: int
    groups: int


MODELS = (
    Model("Flash", 64, 4096, 512, 8),
    Model("Pro", 128, 7168, 1024, 16),
)


@dataclass(frozen=True)
class Sizes:
    """Ranges of what a deployment varies.

    Attributes:
        heads: (label, attention heads of one rank).
        tokens: of a decode or a small batch.
        chunks: tokens of a prefill chunk.
        requests: of a batch.
    """

    heads: tuple[tuple[str, int], ...]
    tokens: tuple[int, ...]
    chunks: tuple[int, ...]
    requests: tuple[int, ...]


SHIPPED = Sizes(
    heads=tuple(
        (f"{model.name} TP{parallel}", model.heads // parallel)
        for model in MODELS
        for parallel in (1, 2, 4, 8)
    ),
    tokens=(1, 16, 64, 128, 512),
    chunks=(2048,),
    requests=(1, 16),
)
"""What is compiled: both models at every tensor-parallel size."""
EVERY = Sizes(
    heads=tuple((f"H{n}", n) for n in (1, 2, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128)),
    tokens=(1, 2, 3, 4, 7, 8, 16, 31, 64, 128, 200, 256, 257, 512, 1024),
    chunks=(1, 17, 256, 2048, 8192),
    requests=(1, 3, 64, 256, 1024),
)
"""What is only recorded, to check that `SHIPPED` compiles all configurations of it."""
SERVED = replace(EVERY, heads=tuple((f"H{n}", n) for n in (2, 4, 8, 16, 32, 64, 128)))
"""What is only recorded, to check that `SHIPPED` compiles all specializations of it.

A rank has a model's heads over a tensor-parallel size. Other numbers are in `EVERY`
because a configuration must not depend on them.
"""


@dataclass(frozen=True)
class Case:
    """One call: the op it belongs to, a label of its shape, and the call itself."""

    op: str
    label: str
    call: Callable[[], Any]


def meta(*shape: int, dtype: torch.dtype = bf16) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def pages(block_size: int, blocks: int = 4096) -> torch.Tensor:
    """An FP8 page cache `[blocks, block_size, 584]` with vLLM's padded block stride."""
    flat = meta(blocks, PAGE_BYTES[block_size], dtype=u8)
    return flat.as_strided((blocks, block_size, 584), (PAGE_BYTES[block_size], 584, 1))


def op(module: str, name: str) -> Callable[..., Any]:
    """A public function of the kernels, imported when a case runs."""
    function: Callable[..., Any] = getattr(import_module(f"{PACKAGE}.{module}"), name)
    return function


def call(module: str, name: str, *args: Any, **kwargs: Any) -> Callable[[], object]:
    """A call of such a function."""
    return lambda: op(module, name)(*args, **kwargs)
