# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 Vision in float32: Hugging Face's text model and what that lacks.

Image tokens see their whole image, a second bias chooses their experts, and vectors of
the tower take the place of their embeddings.
"""

from pathlib import Path
from typing import Any

import torch

from proof.e2e import pictures
from proof.e2e.checkpoints import checkpoint, vision
from proof.e2e.twins import tower
from proof.e2e.twins.twin import Given, Twin


class VisionTwin(Twin):
    """The model of a Vision checkpoint: its text model's twin, and its other tensors as
    published."""

    def __init__(self, published: Path, folder: Path) -> None:
        super().__init__(folder)
        self.weights = {
            name: tensor.float()
            for name, tensor in checkpoint.tensors(published)
            if name.startswith(("vision.", "aligner.", "image_"))
            or name.endswith(".bias_vl")
        }
        self.pictures: dict[tuple[int, ...], tuple[pictures.Picture, ...]] = {}
        """Those of a text that does not know its own, by its tokens."""
        self._ids, self._text = torch.empty(0, dtype=torch.long), list[int]()
        self.model.model.embed_tokens.register_forward_hook(self._embed)
        for number, layer in enumerate(self.model.model.layers):
            bias = self.weights[f"layers.{number}.ffn.gate.bias_vl"]
            layer.mlp.gate.register_forward_hook(self._routing(bias))

    def sees(self, length: int, tokens: list[int]) -> torch.Tensor:
        seen = super().sees(length, tokens)
        for first, last in pictures.spans(tokens[:length]):
            seen[first : last + 1, first : last + 1] = True
        return seen

    def feed_forward(
        self, layer: int, x: torch.Tensor, tokens: list[int]
    ) -> torch.Tensor:
        self._ids = torch.tensor(tokens)
        return super().feed_forward(layer, x, tokens)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def logits(self, tokens: list[int]) -> torch.Tensor:
        self._ids, self._text = torch.tensor(tokens), tokens
        mask = self.mask(len(tokens), tokens)
        result: torch.Tensor = self.model(
            self._ids[None], use_cache=False, attention_mask={"any": mask}
        )
        return result.logits[0]

    def attention(
        self,
        layer: int,
        x: torch.Tensor,
        given: Given | None = None,
        tokens: list[int] | None = None,
    ) -> torch.Tensor:
        assert tokens is not None, "which tokens are those of an image?"
        return super().attention(layer, x, given, tokens)

    def image_rows(self, text: list[int]) -> torch.Tensor:
        """What the tower gives for the patches of a text's images, in its order."""
        exact = tower.Tower(self.weights, lambda x: x)
        images = pictures.images_of(text, self.pictures)
        return torch.cat([rows_of(exact, picture) for picture in images])

    def _embed(self, _: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        ids = inputs[0][0]
        for part in vision.PARTS:
            own = getattr(pictures, part.removeprefix("image_").upper())
            output[0, ids == own] = self.weights[part]
        if (ids == pictures.PATCHES).any():
            output[0, ids == pictures.PATCHES] = self.image_rows(self._text)
        return output

    def _routing(self, bias: torch.Tensor) -> Any:
        def choose(router: Any, _: Any, output: tuple[torch.Tensor, ...]) -> Any:
            logits, weights, indices = output
            scores = router.score_fn(logits)
            by_image = (scores + bias).topk(router.top_k).indices
            theirs = scores.gather(1, by_image)
            theirs *= router.routed_scaling_factor / theirs.sum(-1, keepdim=True)
            kind = self._ids - pictures.SENTINELS
            image = ((kind >= 0) & (kind < 5))[:, None]
            return (
                logits,
                torch.where(image, theirs, weights),
                torch.where(image, by_image, indices),
            )

        return choose


def rows_of(seen_by: tower.Tower, picture: pictures.Picture) -> torch.Tensor:
    """What a tower gives for the places of an image's patches, in their order."""
    _, order = pictures.block(picture, 0)
    return seen_by.encoded(picture)[order]
