# SPDX-License-Identifier: Apache-2.0
"""Small Engram tables of DeepSeek-V4.1, and the rows that they must give."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import torch

from . import layout

ENGRAM = "vllm.models.deepseek_v41.common.engram"
DIM, QUANT_BLOCK = 64, 32
HEADS, NGRAM = 8, 4
COLUMNS = HEADS * (NGRAM - 1)
DEAD = -1


def small_config() -> Any:
    """Tables of so few rows that n-grams collide."""
    return SimpleNamespace(
        engram_layer_ids=[1, 2],
        engram_num_embeddings=[20000, 20000],
        engram_max_ngram_size=NGRAM,
        engram_n_heads=HEADS,
        engram_head_dim=DIM,
        engram_compressed_vocab_size=7,
        engram_pad_token_id=0,
        engram_vocab_size=11,
        num_hidden_layers=3,
    )


def tables() -> Any:
    """The module whose tables lie in host memory: a release that has others there has
    these in NVIDIA's folder."""
    for name in ("vllm.models.deepseek_v41.nvidia.engram", ENGRAM):
        if importlib.util.find_spec(name):
            return layout.module(name)
    raise AssertionError("no Engram")


def engram_layout() -> Any:
    return layout.module(ENGRAM).EngramLayout(small_config())


def unfilled(layer: int = 0, cpu_offload: bool = True) -> Any:
    """A table as it is before a checkpoint is loaded."""
    sizes = engram_layout().primes[layer]
    return tables().ParallelEngramEmbedding(
        small_config().engram_num_embeddings[layer],
        DIM,
        tuple(size for order in sizes for size in order),
        cpu_offload=cpu_offload,
    )


def table(layer: int = 0) -> Any:
    """A table with all its bytes drawn, but for NaN, and scales around one."""
    config, made = small_config(), unfilled(layer)
    generator = torch.Generator().manual_seed(layer)
    rows = config.engram_num_embeddings[layer]
    drawn = torch.randint(0, 255, (rows, DIM), generator=generator).byte()
    drawn[(drawn & 0x7F) == 0x7F] = 0
    scales = torch.randint(120, 134, (rows, DIM // QUANT_BLOCK), generator=generator)
    return filled(made, drawn.view(torch.float8_e4m3fn), scales.byte())


def filled(made: Any, values: torch.Tensor, scales: torch.Tensor) -> Any:
    """The table with its part of these rows, as a checkpoint's are loaded."""
    made.weight.weight_loader(made.weight, values)
    made.weight_scale_inv.weight_loader(
        made.weight_scale_inv, scales.view(torch.float8_e8m0fnu)
    )
    made.drawn = values, scales
    return made


def expected_rows(made: Any, ids: torch.Tensor) -> torch.Tensor:
    """Rows of the table times two to the power of their scales; what the table does
    not have is zero."""
    values, scales = made.drawn
    ids = ids.long().cpu()
    owned = (ids >= 0) & (ids < made.part_num_embeddings)
    rows, exponents = values.double(), scales.double() - 127
    rows = rows * torch.exp2(exponents).repeat_interleave(QUANT_BLOCK, dim=1)
    chosen = rows[ids.where(owned, 0)]
    return (chosen * owned[..., None]).bfloat16()


def drawn_ids(made: Any, tokens: int) -> torch.Tensor:
    """Ids of all rows, some dead and some beyond the table."""
    generator = torch.Generator().manual_seed(tokens)
    shape = (tokens, COLUMNS)
    ids = torch.randint(0, made.part_num_embeddings, shape, generator=generator)
    kind = torch.randint(0, 8, shape, generator=generator)
    ids[kind == 0] = DEAD
    ids[kind == 1] = made.part_num_embeddings
    ids[kind == 2] = 2**31 - 1
    return ids.int().to(layout.device())


def looked_up(made: Any, ids: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(ids), COLUMNS, DIM), float("nan"), dtype=torch.bfloat16).to(
        layout.device()
    )
    made.lookup(ids, out)
    return out
