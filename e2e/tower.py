# SPDX-License-Identifier: Apache-2.0
"""The vision tower of DeepSeek-V4 Vision in float32, written from its description.

Hugging Face's transformers has none. Patches attend to each other in both directions,
and RoPE turns half of a head by their row and half by their column.
"""

import torch
from torch.nn import functional

from e2e import vision
from e2e.pictures import MERGED, PATCH, Picture

Weights = dict[str, torch.Tensor]


def patches_of(picture: Picture) -> torch.Tensor:
    """The colours from -1 to 1 in bfloat16, patch by patch, `[patches, values]`."""
    colours = torch.from_numpy(picture.pixels()).float() / 127.5 - 1
    rows = colours.to(torch.bfloat16).float().permute(2, 0, 1)
    tiles = rows.unflatten(2, (-1, PATCH)).unflatten(1, (-1, PATCH))
    return tiles.permute(1, 3, 0, 2, 4).flatten(2).flatten(0, 1)


def encoded(weights: Weights, picture: Picture) -> torch.Tensor:
    """What the tower makes of a picture: a row for each of its tokens, along and then
    down, `[tokens, hidden]`."""
    x = _linear(weights, "vision.patch_embed.proj", patches_of(picture))
    turns = _turns(picture.down, picture.along)
    for number in range(vision.LAYERS):
        block = f"vision.blocks.{number}"
        x = x + _attention(
            weights, f"{block}.attn", _norm(weights, f"{block}.norm1", x), turns
        )
        up = _linear(weights, f"{block}.mlp.w1", _norm(weights, f"{block}.norm2", x))
        gate, up = up.chunk(2, -1)
        x = x + _linear(weights, f"{block}.mlp.w2", functional.silu(gate) * up)
    x = _norm(weights, "vision.norm", x).unflatten(0, (picture.down, picture.along))
    missing = (-picture.along % MERGED, -picture.down % MERGED)
    x = functional.pad(x, (0, 0, 0, missing[0], 0, missing[1]))
    tiles = x.unflatten(1, (-1, MERGED)).unflatten(0, (-1, MERGED))
    # The values of one channel lie together, row by row.
    merged = tiles.permute(0, 2, 4, 1, 3).flatten(2).flatten(0, 1)
    inner = functional.gelu(_linear(weights, "aligner.w1", merged))
    return _linear(weights, "aligner.w2", inner)


def _linear(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _norm(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], 1e-6)


def _turns(down: int, along: int) -> torch.Tensor:
    """A unit complex number for each patch and pair of a head, `[patches, pairs]`: the
    first half of them for the row, the second for the column."""
    pairs = vision.WIDTH // vision.HEADS // 4
    speeds = vision.TOWER["vision_rope_theta"] ** (-torch.arange(pairs) / pairs)
    row = torch.arange(down).repeat_interleave(along)[:, None] * speeds
    column = torch.arange(along).repeat(down)[:, None] * speeds
    angles = torch.cat((row, column), -1)
    return torch.polar(torch.ones_like(angles), angles)


def _attention(
    weights: Weights, name: str, x: torch.Tensor, turns: torch.Tensor
) -> torch.Tensor:
    parts = _linear(weights, f"{name}.wqkv", x).chunk(3, -1)
    q, k, v = (part.unflatten(-1, (vision.HEADS, -1)).transpose(0, 1) for part in parts)
    # A value and the one half a head further on are a pair.
    q, k = (
        torch.view_as_real(torch.complex(*part.chunk(2, -1)) * turns)
        .transpose(-1, -2)
        .flatten(-2)
        for part in (q, k)
    )
    attended = functional.scaled_dot_product_attention(q, k, v)
    return _linear(weights, f"{name}.wo", attended.transpose(0, 1).flatten(1))
