# SPDX-License-Identifier: Apache-2.0
"""The checkpoint of DeepSeek-V4.1, as V4.1-Flash is published, as small as it can be.

Linear layers in MXFP8 with a scale for each 32 x 32, experts in MXFP4, and Engram's
tables in FP8 with a scale for each 32 of a row. Layers of ratio 2 and 1 share what some
of them write: `KV_SOURCES` the compressed entries and the indexer's keys,
`INDEX_SOURCES` the choice of them, `CANDIDATES` the blocks that later choices keep to.
"""

from collections.abc import Mapping
from typing import Any

from proof.e2e import pictures
from proof.e2e.checkpoints import checkpoint, dspark, engram, vision

SCALED = 32
RATIOS = (0, 2, 2, 1, 1, 1)
KV_SOURCES = (1, 3)
"""Two pipeline stages meet before the second."""
INDEX_SOURCES = (1, 3, 4)
CANDIDATES = 3
BLOCKS = 4
"""Candidate blocks of a token."""
BLOCK = 8
"""Entries of a block: the chosen blocks hold twice what the indexer chooses, and 129
tokens fill seventeen."""
INDEX_HEADS = 32
ENGRAM_LAYERS = (1, 2)
ENGRAM_DIM = 64
EPSILON = 1e-20
DRAFT_EXPERTS = (4, 3)
"""Experts of a draft layer, and how many of them a token chooses."""
PARTS = ("image_start", "image_end", "image_newline")
IMAGE = 129_264
"""The token of every place of an image; beyond the vocabulary of text alone."""

SERVER = (
    ("skip_tokenizer_init", False),
    ("limit_mm_per_prompt", {"image": 0}),
    ("kv_cache_memory_bytes", 64 << 20),
    ("block_size", 128),
)
"""What an engine needs for it: text alone, in blocks of 128 tokens."""


def sized(vocabulary: int) -> checkpoint.Size:
    """The model with so many tokens."""
    return checkpoint.Size(
        ratios=RATIOS, hashed=0, intermediate=576, vocabulary=vocabulary
    )


def texts(vocabulary: int) -> list[str]:
    """What each token reads as: a character, that of an image, or its own number."""
    known = list(map(chr, range(checkpoint.VOCABULARY)))
    known += [f"<{token}>" for token in range(checkpoint.VOCABULARY, vocabulary)]
    if vocabulary > IMAGE:
        known[IMAGE] = pictures.PLACEHOLDER_TEXT
    return known


class V41(dspark.DSpark):
    """Writes the model, its draft and its tower."""

    size = sized(checkpoint.VOCABULARY)
    """A rank of two has 288 columns of each expert, as one of eight has of Flash."""
    block = SCALED
    target_layers = (3, 4, 5)
    markov = ("embed", "head")
    kv_sources: tuple[int, ...] = KV_SOURCES
    index_sources: tuple[int, ...] = INDEX_SOURCES
    candidates = CANDIDATES, BLOCKS
    draft_experts = DRAFT_EXPERTS
    engram_layers: tuple[int, ...] = ENGRAM_LAYERS
    engram_dim = ENGRAM_DIM
    engram_rows = engram.LEAST
    """Of a column of a table, at least."""

    def __init__(self, seed: int, successors: Mapping[int, int] | None = None) -> None:
        super().__init__(seed, successors or {})
        self.hashes = engram.Hashes(
            self.engram_layers,
            tuple(engram.compressed(self.texts())),
            self.engram_rows,
        )
        vision.write_tower(self, PARTS)
        for place, layer in enumerate(self.engram_layers):
            self._engram(f"layers.{layer}.engram", sum(self.hashes.sizes[place]))

    def texts(self) -> list[str]:
        """What each token of its tokenizer reads as."""
        return texts(self.size.vocabulary)

    def config(self) -> dict[str, Any]:
        text = checkpoint.config(self.size) | self.described()
        packing = text.pop("quantization_config")
        del text["num_hash_layers"], text["architectures"]
        return {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": "deepseek_v41",
            "torch_dtype": text.pop("torch_dtype"),
            "image_token_id": IMAGE,
            "text_config": text,
            "vision_config": {
                "num_hidden_layers": vision.LAYERS,
                "hidden_size": vision.WIDTH,
                "num_attention_heads": vision.HEADS,
                "intermediate_size": vision.INNER,
                "patch_size": vision.TOWER["vision_patch_size"],
                "rope_theta": vision.THETA,
                "downsample_ratio": vision.TOWER["vision_downsample_ratio"],
                "max_image_tokens": vision.MOST,
                "min_pixels": vision.TOWER["vision_min_pixels"],
                "max_wh_ratio": vision.TOWER["vision_max_wh_ratio"],
            },
            "quantization_config": packing
            | {
                "weight_block_size": [SCALED, SCALED],
                "expert_dtype": text.pop("expert_dtype"),
            },
        }

    def described(self) -> dict[str, Any]:
        """What its `text_config` has in place of V4's or besides."""
        draft = super().described()
        stages = draft.pop("n_mtp_layers")
        return draft | {
            "model_type": "deepseek_v41_text",
            "rms_norm_eps": EPSILON,
            "compress_ratios": [*self.size.ratios, *[0] * stages],
            "kv_source_layer_ids": list(self.kv_sources),
            "index_source_layer_ids": list(self.index_sources),
            "index_n_heads": INDEX_HEADS,
            "candidate_source_layer_id": self.candidates[0],
            "candidate_topk_blocks": self.candidates[1],
            "candidate_block_size": BLOCK,
            "engram_layer_ids": list(self.engram_layers),
            "engram_num_embeddings": list(map(sum, self.hashes.sizes)),
            "engram_max_ngram_size": engram.ORDERS[-1],
            "engram_vocab_size": self.engram_rows,
            "engram_n_heads": engram.HEADS,
            "engram_head_dim": self.engram_dim,
            "engram_pad_token_id": engram.PAD,
            "engram_compressed_vocab_size": max(self.hashes.tokens) + 1,
            "num_nextn_predict_layers": stages,
            "dspark_n_routed_experts": self.draft_experts[0],
            "dspark_num_experts_per_tok": self.draft_experts[1],
        }

    def known_to_twin(self, name: str) -> bool:
        """The twin has the draft's layers, but not the bias that decides for it."""
        return ".markov_head." not in name

    def output_head(self, prefix: str) -> None:
        """None: the mixes of the last layer make one state of the streams."""

    def attention(self, attn: str, ratio: int) -> None:
        checkpoint.window(self, attn)
        kind, number = attn.split(".")[:2]
        if kind == "mtp" or not ratio:
            return
        layer, dim, hidden = int(number), checkpoint.HEAD_DIM, self.size.hidden
        if layer in self.kv_sources:
            for part in ("wkv", "wgate")[:ratio]:
                weight = self.random(dim, hidden, std=hidden**-0.5)
                self.plain(f"{attn}.compressor.{part}.weight", weight)
            self.norm(f"{attn}.compressor.norm", dim)
        if layer in self.index_sources:
            checkpoint.index_queries(self, f"{attn}.indexer", INDEX_HEADS)
        if layer in self.kv_sources:
            keys = self.random(checkpoint.INDEX_DIM, dim, std=dim**-0.5)
            self.plain(f"{attn}.indexer.wk.weight", keys)
            self.norm(f"{attn}.indexer.k_norm", checkpoint.INDEX_DIM)

    def router(self, layer: str, hashed: bool) -> None:
        super().router(layer, hashed)
        self.lifting_bias(f"{layer}.ffn.gate.bias_vl")

    def routed(self, layer: str) -> tuple[int, int]:
        draft = layer.startswith("mtp.")
        return self.draft_experts if draft else super().routed(layer)

    def _engram(self, name: str, rows: int) -> None:
        hidden, streams = self.size.hidden, checkpoint.STREAMS
        table = checkpoint.fp8_blocks(self.random(rows, self.engram_dim), (1, SCALED))
        self._quantized(f"{name}.embed", table)
        width = engram.COLUMNS * self.engram_dim
        self.fp8(f"{name}.wkv", hidden * (streams + 1), width)
        for part in ("q_weight", "k_weight"):
            values = self.random(streams, hidden, std=0.1, mean=1.0)
            self.plain(f"{name}.{part}", values)


class Narrow(V41):
    """The same with shorter windows: a prompt's end needs fewer rows."""

    window = 64

    def described(self) -> dict[str, Any]:
        return super().described() | {"sliding_window": self.window}


class EngramOfTwoStages(V41):
    """The same with a table on either side of the second KV source."""

    engram_layers = (1, 4)
