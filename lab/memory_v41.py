# SPDX-License-Identifier: Apache-2.0
"""The shapes of DeepSeek-V4.1-Flash, from which the model of a step knows its weights.

Of the layers with compressed entries some write them ("source"), some choose among them
anew ("index"), and the others take entries and choice from an earlier one ("shared").
`xpustack plan` starts the release with the published tensors, and a test compares what
a rank then holds with the sum of these.
"""

from dataclasses import dataclass
from typing import ClassVar

from .memory import BF16, FP32, HEAD, HYPER, INDEX_HEAD, MXFP4, Group, Shapes, mixing

MXFP8 = 1 + 1 / (32 * 32)
"""Bytes per weight: one, and one byte of scale for 32 x 32 weights."""


@dataclass(frozen=True)
class V41(Shapes):
    """V4.1-Flash.

    Attributes:
        sources2: of the layers of ratio 2, those that write entries and choose.
        sources1: the same of ratio 1.
        indexing1: of the layers of ratio 1, those that choose among others' entries.
        engrams: layers with a table of n-grams.
        lookups: rows of a table that a token reads.
        row: values of one.
    """

    name: str = "V4.1-Flash"
    hidden: int = 5120
    heads: int = 64
    q_lora: int = 1280
    o_lora: int = 1024
    output_groups: int = 8
    experts: int = 384
    width: int = 2304
    active: int = 6
    vocabulary: int = 129_280
    topk: int = 512
    index_heads: int = 32
    plain: int = 2
    ratio2: int = 18
    sources2: int = 3
    ratio1: int = 20
    sources1: int = 1
    indexing1: int = 4
    engrams: int = 2
    lookups: int = 24
    row: int = 256
    family: ClassVar[str] = "V4.1"

    @property
    def kinds(self) -> dict[str, int]:
        return {
            "window": self.plain,
            "shared2": self.ratio2 - self.sources2,
            "source2": self.sources2,
            "shared1": self.ratio1 - self.sources1 - self.indexing1,
            "source1": self.sources1,
            "index1": self.indexing1,
        }

    @property
    def parts(self) -> dict[str, int]:
        return {"engram": self.engrams}

    @property
    def gathers(self) -> tuple[tuple[int, int], ...]:
        """Rows of the tables, and what a product makes of them."""
        made = (HYPER + 1) * self.hidden
        return (self.engrams, self.lookups * self.row), (self.engrams, made)

    @property
    def late(self) -> int:
        return self.ratio1 - self.sources1

    def entries(self, context: int) -> dict[str, int]:
        return {
            kind: context // int(kind[-1]) for kind in self.kinds if kind != "window"
        }

    def chosen(self, context: int) -> dict[str, int]:
        entries = self.entries(context)
        return {kind: min(entries.get(kind, 0), self.topk) for kind in self.kinds}

    def scored(self, context: int) -> dict[str, int]:
        """All entries: those outside the candidate blocks are masked afterwards."""
        entries = self.entries(context)
        return {kind: entries[kind] for kind in ("source2", "source1", "index1")}

    def stored(self) -> list[Group]:
        hidden, layers = self.hidden, self.layers
        sources = self.sources2 + self.sources1
        indexers = sources + self.indexing1
        expert = 3 * hidden * self.width
        return [
            Group("experts", expert * self.experts * layers, MXFP4, True),
            Group("shared expert", expert * layers, MXFP8, True),
            *(
                Group("projections", count * layers, size, sharded)
                for count, size, sharded in (
                    (hidden * (self.q_lora + HEAD), MXFP8, False),
                    (self.q_lora * self.heads * HEAD, MXFP8, True),
                    # Widened at load: no op multiplies groups in MXFP8.
                    (self.heads * HEAD * self.o_lora, BF16, True),
                    (self.output_groups * self.o_lora * hidden, MXFP8, True),
                )
            ),
            # Of ratio 1 there is nothing to weigh.
            Group("compressor", HEAD * hidden * (sources + self.sources2), BF16, False),
            Group("compressor", HEAD * sources, BF16, False),
            Group(
                "indexer",
                self.q_lora * self.index_heads * INDEX_HEAD * indexers,
                MXFP8,
                False,
            ),
            Group("indexer", hidden * self.index_heads * indexers, BF16, False),
            Group("indexer", (HEAD + 1) * INDEX_HEAD * sources, BF16, False),
            Group("router", hidden * self.experts * layers, BF16, False),
            Group("router", 2 * self.experts * layers, FP32, False),
            Group("hyper-connections", 2 * mixing(hidden) * layers, FP32, False),
            Group(
                "norms",
                (2 * hidden + self.q_lora + HEAD) * layers + hidden,
                BF16,
                False,
            ),
            Group("sinks", self.heads * layers, FP32, True),
            Group(
                "Engram",
                self.lookups * self.row * (HYPER + 1) * hidden * self.engrams,
                MXFP8,
                True,
            ),
            Group("Engram", 2 * HYPER * hidden * self.engrams, BF16, False),
            Group("embedding", self.vocabulary * hidden, BF16, True),
            Group("head", self.vocabulary * hidden, BF16, True),
        ]


FLASH_V41 = V41()
