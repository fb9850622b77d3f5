# SPDX-License-Identifier: Apache-2.0
"""V4.1 with images: its checkpoint with the whole vocabulary, and what its float32 twin
does with images.

Each place of an image has one token. A vector of the tower, or the one of a part, takes
the place of its embedding, a second bias chooses its experts, and Engram neither reads
nor changes it. Images are seen as text is: from behind, within the window.
"""

from pathlib import Path

import torch

from proof.e2e import pictures
from proof.e2e.checkpoints import checkpoint, v41
from proof.e2e.pictures import Picture
from proof.e2e.twins import tower
from proof.e2e.twins.v41_draft_twin import V41DraftTwin

START, PATCHES, NEWLINE, END = range(4)


class Images(v41.V41):
    """The same with a token for each place of an image."""

    size = v41.sized(129_280)

    def special_tokens(self) -> dict[str, int]:
        return {pictures.PLACEHOLDER_TEXT: v41.IMAGE}

    def write_tokenizer(self, folder: Path) -> None:
        texts = enumerate(v41.texts(self.size.vocabulary))
        others = {text: token for token, text in texts if token != v41.IMAGE}
        checkpoint.write_tokenizer(folder, self.special_tokens(), others)


def block(picture: Picture) -> list[int]:
    """The parts of an image in the order of its tokens: rows of patches, each with its
    end."""
    rows, columns = picture.grid
    return [START, *[*[PATCHES] * columns, NEWLINE] * rows, END]


class V41VisionTwin(V41DraftTwin):
    """V4.1's twin and that of its draft, which see images."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.pictures: dict[tuple[int, ...], tuple[Picture, ...]] = {}
        """Those of a text that does not know its own, by its tokens."""

    def embedded(self, tokens: list[int]) -> torch.Tensor:
        embedded = super().embedded(tokens).clone()
        places = self._images(tokens)
        embedded[places] = self._rows(tokens)[: int(places.sum())]
        return embedded

    def remembered(
        self, layer: int, streams: torch.Tensor, tokens: list[int]
    ) -> torch.Tensor:
        told = super().remembered(layer, streams, tokens)
        return streams.where(self._images(tokens)[:, None, None], told)

    def bias(self, router: str, tokens: list[int]) -> torch.Tensor:
        lifted = self.weights[f"{router}.bias_vl"]
        return lifted.where(self._images(tokens)[:, None], super().bias(router, tokens))

    def _images(self, tokens: list[int]) -> torch.Tensor:
        return torch.tensor(tokens) == v41.IMAGE

    def _rows(self, tokens: list[int]) -> torch.Tensor:
        """What takes the places of a text's images, in their order."""
        found = [torch.empty(0, self.config["hidden_size"])]
        seen = v41.IMAGE in tokens
        for picture in pictures.images_of(tokens, self.pictures) if seen else ():
            parts = torch.tensor(block(picture))
            rows = torch.empty(len(parts), self.config["hidden_size"])
            seen_by = tower.Tower(self.weights, self.forms.kept)
            rows[parts == PATCHES] = seen_by.encoded(picture)
            for part, name in ((START, "start"), (NEWLINE, "newline"), (END, "end")):
                rows[parts == part] = self.weights[f"image_{name}"]
            found.append(rows)
        return torch.cat(found)
