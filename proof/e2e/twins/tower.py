# SPDX-License-Identifier: Apache-2.0
"""The vision tower of DeepSeek-V4 Vision in float32, written from its description.

Hugging Face's transformers has none. Patches attend to each other in both directions,
and RoPE turns half of a head by their row and half by their column.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

from proof.e2e.checkpoints import vision
from proof.e2e.pictures import MERGED, PATCH, Picture

Weights = dict[str, torch.Tensor]


def patches_of(picture: Picture) -> torch.Tensor:
    """The colours from -1 to 1 in bfloat16, patch by patch, `[patches, values]`."""
    colours = torch.from_numpy(picture.pixels()).float() / 127.5 - 1
    rows = colours.to(torch.bfloat16).float().permute(2, 0, 1)
    tiles = rows.unflatten(2, (-1, PATCH)).unflatten(1, (-1, PATCH))
    return tiles.permute(1, 3, 0, 2, 4).flatten(2).flatten(0, 1)


class Tower:
    """The tower of a checkpoint's weights, which rounds what each operator gives by
    `kept`."""

    def __init__(
        self, weights: Weights, kept: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self.weights, self.kept = weights, kept

    def encoded(self, picture: Picture) -> torch.Tensor:
        """What it makes of a picture: a row for each of its tokens, along and then
        down, `[tokens, hidden]`."""
        x = self._linear("vision.patch_embed.proj", patches_of(picture))
        turns = _turns(picture.down, picture.along)
        for number in range(vision.LAYERS):
            block = f"vision.blocks.{number}"
            seen = self._norm(f"{block}.norm1", x)
            x = self.kept(x + self._attention(f"{block}.attn", seen, turns))
            seen = self._norm(f"{block}.norm2", x)
            gate, up = self._linear(f"{block}.mlp.w1", seen).chunk(2, -1)
            gated = self.kept(functional.silu(gate) * up)
            x = self.kept(x + self._linear(f"{block}.mlp.w2", gated))
        x = self._norm("vision.norm", x)
        merged = _merged(x.unflatten(0, (picture.down, picture.along)))
        inner = self.kept(functional.gelu(self._linear("aligner.w1", merged)))
        return self._linear("aligner.w2", inner)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        bias = self.weights.get(f"{name}.bias")
        return self.kept(functional.linear(x, self.weights[f"{name}.weight"], bias))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.weights[f"{name}.weight"]
        return self.kept(functional.rms_norm(x, x.shape[-1:], weight, 1e-6))

    def _attention(
        self, name: str, x: torch.Tensor, turns: torch.Tensor
    ) -> torch.Tensor:
        parts = self._linear(f"{name}.wqkv", x).chunk(3, -1)
        heads = [p.unflatten(-1, (vision.HEADS, -1)).transpose(0, 1) for p in parts]
        # A value and the one half a head further on are a pair.
        q, k = (
            self.kept(
                torch.view_as_real(torch.complex(*part.chunk(2, -1)) * turns)
                .transpose(-1, -2)
                .flatten(-2)
            )
            for part in heads[:2]
        )
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        attended = self.kept(self.kept(scores.softmax(-1)) @ heads[2])
        return self._linear(f"{name}.wo", attended.transpose(0, 1).flatten(1))


def _merged(x: torch.Tensor) -> torch.Tensor:
    """Three by three patches for each token of `[down, along, width]`, zeros beyond the
    edges; the values of one channel lie together, row by row."""
    along, down = -x.shape[1] % MERGED, -x.shape[0] % MERGED
    x = functional.pad(x, (0, 0, 0, along, 0, down))
    tiles = x.unflatten(1, (-1, MERGED)).unflatten(0, (-1, MERGED))
    return tiles.permute(0, 2, 4, 1, 3).flatten(2).flatten(0, 1)


def _turns(down: int, along: int) -> torch.Tensor:
    """A unit complex number for each patch and pair of a head, `[patches, pairs]`: the
    first half of them for the row, the second for the column."""
    pairs = vision.WIDTH // vision.HEADS // 4
    speeds = vision.THETA ** (-torch.arange(pairs) / pairs)
    row = torch.arange(down).repeat_interleave(along)[:, None] * speeds
    column = torch.arange(along).repeat(down)[:, None] * speeds
    angles = torch.cat((row, column), -1)
    return torch.polar(torch.ones_like(angles), angles)
