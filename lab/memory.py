# SPDX-License-Identifier: Apache-2.0
"""Compute from its shapes how much memory DeepSeek-V4 takes on each device.

Weights are sharded as vLLM shards them: heads, output groups, expert widths and the
vocabulary over the ranks. Each rank holds a whole copy of the other weights, and of the
KV cache, because there is one key-value head. `xpustack plan` starts the release
instead, and a test compares the two.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

HEAD = 512
INDEX_HEADS, INDEX_HEAD = 64, 128
HYPER = 4
BLOCK = 256
WINDOW = 128
GIB = 1 << 30
MXFP4 = 0.5 + 1 / 32
"""Bytes per weight: four bits, and one byte of scale for 32 weights."""
BLOCK_FP8 = 1 + 1 / (128 * 128)
BF16, FP32 = 2.0, 4.0
EXPERT_COLUMNS = 64
"""Columns of an expert on a rank of an XPU are padded to a multiple of so many."""


@dataclass(frozen=True)
class Group:
    """Weights that are stored and sharded in the same way.

    Attributes:
        part: of the model, as `lab.aot.costs.step` sums them up.
        count: how many.
        size: bytes of one.
        sharded: whether each rank holds only its part.
        dense: linear layers in block FP8, which a release may widen to bf16.
    """

    part: str
    count: int
    size: float
    sharded: bool
    dense: bool = False


class Shapes(ABC):
    """What the model of a step asks of a DeepSeek-V4 or V4.1.

    Attributes:
        family: of `lab/aot/step.toml`, whose launches its layers have.
        width: columns of an expert.
        active: experts per token.
        index_heads: of an indexer.
        topk: entries that it chooses for a token.
    """

    family: ClassVar[str]
    name: str
    hidden: int
    heads: int
    experts: int
    width: int
    active: int
    index_heads: int
    topk: int

    @property
    def parts(self) -> dict[str, int]:
        """What some layers have beside attention and experts, and how many."""
        return {}

    @property
    def gathers(self) -> tuple[tuple[int, int], ...]:
        """What ranks gather beside the sums of each layer: how often in a step, and
        values of a token."""
        return ()

    @property
    def late(self) -> int:
        """Layers behind the last that writes compressed entries, where prefill computes
        a prompt's end alone."""
        return 0

    @property
    @abstractmethod
    def kinds(self) -> dict[str, int]:
        """Its layers, counted by their kind."""

    @property
    def layers(self) -> int:
        return sum(self.kinds.values())

    @abstractmethod
    def entries(self, context: int) -> dict[str, int]:
        """Compressed entries of so many tokens, by the kinds of layers with any."""

    @abstractmethod
    def chosen(self, context: int) -> dict[str, int]:
        """Those that a query attends to, by the kind of layer."""

    @abstractmethod
    def scored(self, context: int) -> dict[str, int]:
        """Those that an indexer scores for a query, by the kinds that have one."""

    def padded(self, ranks: int) -> float:
        """How many times the columns that it needs of an expert each of `ranks` ranks
        has."""
        own = self.width / ranks
        return math.ceil(own / EXPERT_COLUMNS) * EXPERT_COLUMNS / own

    @abstractmethod
    def stored(self) -> list[Group]:
        """Every weight but the drafts', in its stored form."""


@dataclass(frozen=True)
class Model(Shapes):
    """The shapes of a DeepSeek-V4.

    Attributes:
        plain: layers without compressed keys.
        by4: layers with one compressed key for 4 tokens, and an indexer.
        by128: layers with one compressed key for 128 tokens.
        hashed: layers whose router looks tokens up in a table.
    """

    name: str
    hidden: int
    heads: int
    q_lora: int
    groups: int
    o_lora: int
    experts: int
    width: int
    plain: int
    by4: int
    by128: int
    active: int = 6
    vocabulary: int = 129_280
    hashed: int = 3
    topk: int = 512
    index_heads: int = INDEX_HEADS
    family: ClassVar[str] = "V4"

    @property
    def kinds(self) -> dict[str, int]:
        return {"window": self.plain, "ratio4": self.by4, "ratio128": self.by128}

    @property
    def ratios(self) -> tuple[int, ...]:
        """Of the published layers in order: 4 and 128 in turn, behind the first two."""
        first = 0 if self.plain else 128
        return tuple(
            first if layer < 2 else (4, 128)[layer % 2] for layer in range(self.layers)
        )

    def entries(self, context: int) -> dict[str, int]:
        return {"ratio4": context // 4, "ratio128": context // 128}

    def chosen(self, context: int) -> dict[str, int]:
        by4 = min(context // 4, self.topk)
        return {"window": 0, "ratio4": by4, "ratio128": context // 128}

    def scored(self, context: int) -> dict[str, int]:
        return {"ratio4": context // 4}

    def stored(self) -> list[Group]:
        hidden, layers = self.hidden, self.layers
        compressed = self.by4 + self.by128
        inner = HEAD * (2 * self.by4 + self.by128)
        index = INDEX_HEADS * INDEX_HEAD
        route_table = self.vocabulary * self.active * self.hashed
        return [
            Group(
                "experts",
                3 * hidden * self.width * self.experts * layers,
                MXFP4,
                True,
            ),
            Group(
                "shared expert", 3 * hidden * self.width * layers, BLOCK_FP8, True, True
            ),
            *(
                Group("projections", count * layers, BLOCK_FP8, sharded, True)
                for count, sharded in (
                    (hidden * (self.q_lora + HEAD), False),
                    (self.q_lora * self.heads * HEAD, True),
                    (self.heads * HEAD * self.o_lora, True),
                    (self.groups * self.o_lora * hidden, True),
                )
            ),
            Group("compressor", 2 * hidden * inner, BF16, False),
            Group(
                "compressor", HEAD * (4 * 2 * self.by4 + 128 * self.by128), FP32, False
            ),
            Group("compressor", HEAD * compressed, BF16, False),
            Group("indexer", self.q_lora * index * self.by4, BLOCK_FP8, False, True),
            Group(
                "indexer",
                hidden * (INDEX_HEADS + 4 * INDEX_HEAD) * self.by4,
                BF16,
                False,
            ),
            Group("indexer", (4 * 2 + 1) * INDEX_HEAD * self.by4, FP32, False),
            Group("router", hidden * self.experts * layers, BF16, False),
            Group("router", self.experts * (layers - self.hashed), FP32, False),
            Group("route table", route_table, FP32, False),
            Group("hyper-connections", 2 * mixing(hidden) * layers, FP32, False),
            Group("hyper-connections", HYPER * HYPER * hidden + HYPER + 1, FP32, False),
            Group(
                "norms",
                (2 * hidden + self.q_lora + HEAD) * layers + hidden,
                BF16,
                False,
            ),
            Group("sinks", self.heads * layers, FP32, True),
            Group("embedding", self.vocabulary * hidden, BF16, True),
            Group("head", self.vocabulary * hidden, BF16, True),
        ]


FLASH = Model("Flash", 4096, 64, 1024, 8, 1024, 256, 2048, 2, 21, 20)
PRO = Model("Pro", 7168, 128, 1536, 16, 1024, 384, 3072, 0, 30, 31, topk=1024)


@dataclass(frozen=True)
class Device:
    """What the driver shows as one device, and its memory in GiB."""

    name: str
    memory: float


DEVICES = (
    Device("Max 1550, one stack", 64),
    Device("Max 1100", 48),
    Device("Arc Pro B70", 32),
    Device("Arc Pro B60", 24),
    Device("Arc Pro B50", 16),
)

SPLITS = ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (16, 1), (8, 4), (16, 2))
"""Tensor-parallel ranks and pipeline stages; ranks must divide the output groups."""


def parameters(model: Model) -> int:
    """How many weights the model has; the table of hashed routes does not count."""
    return sum(group.count for group in model.stored() if group.part != "route table")


def weights(
    model: Model, ranks: int, stages: int = 1, *, widened: bool = False
) -> float:
    """Bytes of weights on one of `ranks` tensor-parallel ranks of a pipeline stage.

    Args:
        stages: pipeline-parallel stages; the fullest one counts, and embedding and
            head are taken as spread like the layers.
        widened: block-FP8 linear layers are held as bf16. Releases without a
            block-FP8 product for XPU do that.
    """
    whole = sum(
        group.count
        * (BF16 if widened and group.dense else group.size)
        / (ranks if group.sharded else 1)
        for group in model.stored()
    )
    return whole * _part(model, stages)


def page(entries: int, size: int) -> int:
    """Bytes of a cache page of `entries`, padded to a multiple of 576 like vLLM's."""
    return -(-entries * size // 576) * 576


def cache_per_token(model: Model) -> float:
    """Bytes of KV cache that each token of a long context takes, on each rank: the
    compressed keys of 584 bytes and the indexer's keys of 132, in whole pages."""
    by4 = page(BLOCK // 4, 584) + page(BLOCK // 4, INDEX_HEAD + 4)
    by128 = page(BLOCK // 128, 584)
    return (model.by4 * by4 + model.by128 * by128) / BLOCK


def cache_per_sequence(model: Model) -> int:
    """Bytes that each running sequence takes on top, on each rank: the last 128
    tokens of every layer, and the compressors' unfinished sums in fp32."""
    window = (WINDOW // 64 + 1) * page(64, 584)
    main4 = 2 * 4 * (2 * 2 * HEAD * 4)
    index4 = 2 * 4 * (2 * 2 * INDEX_HEAD * 4)
    main128 = 128 * (2 * HEAD * 4)
    return model.layers * window + model.by4 * (main4 + index4) + model.by128 * main128


def room(
    model: Model,
    ranks: int,
    device: Device,
    stages: int = 1,
    *,
    share: float = 0.9,
    activations: float = 3.0,
    widened: bool = False,
) -> float:
    """Tokens of KV cache that fit beside the weights on each device; negative where
    the weights alone do not fit.

    Args:
        share: the part of the memory that vLLM may use, `--gpu-memory-utilization`.
        activations: GiB set aside for activations and workspaces.
    """
    free = device.memory * share * GIB - activations * GIB
    left = free - weights(model, ranks, stages, widened=widened)
    return left / (cache_per_token(model) * _part(model, stages))


def _part(model: Model, stages: int) -> float:
    """The share of the layers that the fullest stage has."""
    return -(-model.layers // stages) / model.layers


def mixing(hidden: int) -> int:
    """Weights of one hyper-connection: the map, its base and its scale."""
    rows = (2 + HYPER) * HYPER
    return rows * HYPER * hidden + rows + 3
