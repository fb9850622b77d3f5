# SPDX-License-Identifier: Apache-2.0
"""A tiny random DeepSeek-V4, once as it is published and once as its float32 twin.

The published form has FP8 linear layers with a UE8M0 scale for each block of
128 x 128 and MXFP4 experts, in the names of DeepSeek's checkpoints; vLLM loads it.
The twin holds the same values in float32 under the same names, which
`transformers` renames as it loads. Nothing that a fresh model leaves at zero stays
there: sinks, position biases, correction biases and the hash table are random.

`python -m proof.e2e.checkpoints.checkpoint FOLDER` writes both.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models

BLOCK = 128
MXFP4_BLOCK = 32
E4M3_MAX = 448.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

VOCABULARY = 128
HEAD_DIM = 512
ROPE_DIM = 64
CHOSEN = 4
LEAD = 4.0
"""How far the bias lifts the chosen experts: more than a score can be, so that rounding
never changes the choice of a scored layer."""
STREAMS = 4
INDEX_HEADS = 64
INDEX_DIM = 128
WINDOW = 128
MAX_LENGTH = 512


@dataclass(frozen=True)
class Size:
    """What differs between Flash and Pro, as small as it can be. Flash by default.

    `ratios` are those of the layers, 0 for the window alone; `hashed` how many layers
    choose experts by a table.
    """

    ratios: tuple[int, ...] = (0, 4, 128)
    hashed: int = 1
    hidden: int = 256
    heads: int = 8
    groups: int = 2
    q_lora: int = 128
    o_lora: int = 128
    intermediate: int = 256
    experts: int = 8
    index_topk: int = 16
    chosen: int = CHOSEN
    vocabulary: int = VOCABULARY
    length: int = MAX_LENGTH


FLASH = Size()
PRO = Size((128, 128, 4), 1, 384, 16, 4, 384, 128, 384, 12, 32)
"""Two layers of ratio 128 first, twice the heads and groups, and a hidden size, an
intermediate size and a number of experts that are no powers of two."""


@dataclass(frozen=True)
class Quantized:
    """A weight as published, and the values that its codes mean, float32."""

    codes: torch.Tensor
    scale: torch.Tensor
    values: torch.Tensor


def fp8_blocks(
    weight: torch.Tensor, block: tuple[int, int] = (BLOCK, BLOCK)
) -> Quantized:
    """`[N, K]` in e4m3 with a power of two for each block of rows and columns."""
    blocks = weight.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    exponent = _exponent(blocks.abs().amax((1, 3)), E4M3_MAX)
    power = torch.exp2(exponent.float())[:, None, :, None]
    codes = (blocks / power).to(torch.float8_e4m3fn)
    values = (codes.float() * power).view_as(weight)
    return Quantized(codes.view_as(weight), _e8m0(exponent), values)


def mxfp4(weight: torch.Tensor) -> Quantized:
    """`[N, K]` in e2m1, two a byte, with a power of two for each 32 of a row."""
    groups = weight.unflatten(1, (-1, MXFP4_BLOCK))
    exponent = _exponent(groups.abs().amax(2), E2M1[-1])
    power = torch.exp2(exponent.float())[..., None]
    grid = torch.tensor(E2M1)
    magnitude = ((groups / power).abs()[..., None] - grid).abs().argmin(-1)
    negative = groups < 0
    values = (torch.where(negative, -1.0, 1.0) * grid[magnitude] * power).flatten(1)
    nibbles = (magnitude + 8 * negative).to(torch.uint8).flatten(1)
    packed = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
    return Quantized(packed.view(torch.int8), _e8m0(exponent), values)


def _exponent(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """The least e with amax <= largest * 2^e."""
    exponent = torch.frexp(amax / largest).exponent
    return exponent - (amax <= largest * torch.exp2(exponent.float() - 1)).int()


def _e8m0(exponent: torch.Tensor) -> torch.Tensor:
    return (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


class Writer:
    """Collects both forms of each tensor, name by name."""

    size = FLASH
    block = BLOCK
    """Rows, and columns, that share a scale of an FP8 linear layer."""

    def __init__(self, seed: int) -> None:
        self.published: dict[str, torch.Tensor] = {}
        self.twin: dict[str, torch.Tensor] = {}
        self._generator = torch.Generator().manual_seed(seed)

    def config(self) -> dict[str, Any]:
        """What `config.json` says."""
        return {**config(self.size), **self.described()}

    def described(self) -> dict[str, Any]:
        """What `config.json` says in place of DeepSeek's own or besides."""
        return {}

    def write_tokenizer(self, folder: Path) -> None:
        """What turns text into tokens, into the published form's folder."""
        write_tokenizer(folder, self.special_tokens())

    def draft(self) -> None:
        """The draft model: here the one layer of multi-token prediction."""
        hidden = self.size.hidden
        decoder_layer(self, "mtp.0", 0, hashed=False)
        for name in ("e_proj", "h_proj"):
            self.fp8(f"mtp.0.{name}", hidden, hidden)
        for name in ("enorm", "hnorm", "norm"):
            self.norm(f"mtp.0.{name}", hidden)
        self.output_head("mtp.0.")

    def output_head(self, prefix: str) -> None:
        """What makes one state of the streams behind the last layer."""
        width = STREAMS * self.size.hidden
        fn = self.random(STREAMS, width, std=width**-0.5)
        self.plain(f"{prefix}hc_head_fn", fn, torch.float32)
        self.plain(f"{prefix}hc_head_base", self.random(STREAMS), torch.float32)
        scale = self.random(1, mean=1.0)
        self.plain(f"{prefix}hc_head_scale", scale, torch.float32)

    def attention(self, attn: str, ratio: int) -> None:
        """What attends in a layer."""
        attention(self, attn, ratio)

    def router(self, layer: str, hashed: bool) -> None:
        """What chooses the experts of a layer."""
        gate = f"{layer}.ffn.gate"
        hidden, (experts, chosen) = self.size.hidden, self.routed(layer)
        weight = self.random(experts, hidden, std=hidden**-0.5)
        self.plain(f"{gate}.weight", weight)
        if hashed:
            table = self.choice(self.size.vocabulary, chosen, experts)
            self.plain(f"{gate}.tid2eid", table, torch.int64)
        else:
            self.lifting_bias(f"{gate}.bias")

    def routed(self, layer: str) -> tuple[int, int]:
        """How many experts a layer has, and how many of them a token."""
        return self.size.experts, self.size.chosen

    def lifting_bias(self, name: str) -> None:
        """A bias that chooses by itself."""
        experts, chosen = self.routed(name)
        bias = self.random(experts, std=0.3)
        bias[self.choice(1, chosen, experts)[0]] += LEAD
        self.plain(name, bias, torch.float32)

    def known_to_twin(self, name: str) -> bool:
        """Whether Hugging Face's model has a tensor of that name."""
        return not name.startswith("mtp.")

    def special_tokens(self) -> dict[str, int]:
        """Tokens that the tokenizer has besides characters."""
        return {}

    def random(self, *shape: int, std: float = 1.0, mean: float = 0.0) -> torch.Tensor:
        values = torch.randn(*shape, generator=self._generator)
        return values * std + mean

    def plain(
        self, name: str, values: torch.Tensor, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """A tensor that is not quantized, rounded to the `dtype` it is published in."""
        self.published[name] = values.to(dtype)
        kept = self.published[name]
        self.twin[name] = kept.float() if kept.is_floating_point() else kept

    def fp8(self, name: str, rows: int, columns: int) -> None:
        """A linear layer whose blocks differ in scale from their neighbours and from
        their mirror images, so that the order of the scales matters."""
        block = self.block
        down, along = torch.arange(rows // block), torch.arange(columns // block)
        gains = torch.exp2((down[:, None] + 2 * along).remainder(3).float() - 1)
        # Of 128 x 128 normal values the largest is about 4.
        largest = 4 * columns**-0.5 * gains / gains.square().mean().sqrt()
        weight = self.random(rows, columns)
        blocks = weight.view(rows // block, block, columns // block, block)
        blocks *= (largest / blocks.abs().amax((1, 3)))[:, None, :, None]
        self._quantized(name, fp8_blocks(weight, (block, block)))

    def mxfp4(self, name: str, rows: int, columns: int, gain: float) -> None:
        std = gain * columns**-0.5
        self._quantized(name, mxfp4(self.random(rows, columns, std=std)))

    def norm(self, name: str, width: int) -> None:
        self.plain(f"{name}.weight", self.random(width, std=0.1, mean=1.0))

    def experts_of(self, layer: str) -> None:
        inner, hidden = self.size.intermediate, self.size.hidden
        sizes = {"w1": (inner, hidden), "w3": (inner, hidden), "w2": (hidden, inner)}
        for part, (rows, columns) in sizes.items():
            # Large enough for swiglu_limit to matter.
            gain = 0.1 if part == "w2" else 6.0
            for expert in range(self.routed(layer)[0]):
                name = f"{layer}.ffn.experts.{expert}.{part}"
                self.expert(name, rows, columns, gain)
            self.fp8(f"{layer}.ffn.shared_experts.{part}", rows, columns)

    def expert(self, name: str, rows: int, columns: int, gain: float) -> None:
        """One matrix of a routed expert."""
        self.mxfp4(name, rows, columns, gain)

    def choice(self, rows: int, count: int, of: int) -> torch.Tensor:
        scores = torch.rand(rows, of, generator=self._generator)
        return scores.topk(count, dim=1).indices

    def _quantized(self, name: str, weight: Quantized) -> None:
        """A weight and its scales, under DeepSeek's names."""
        self.published[f"{name}.weight"] = weight.codes
        self.published[f"{name}.scale"] = weight.scale
        self.twin[f"{name}.weight"] = weight.values


def config(size: Size = FLASH) -> dict[str, Any]:
    """`config.json` as a published checkpoint of this size would carry it."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "num_hidden_layers": len(size.ratios),
        "num_attention_heads": size.heads,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "qk_rope_head_dim": ROPE_DIM,
        "q_lora_rank": size.q_lora,
        "o_groups": size.groups,
        "o_lora_rank": size.o_lora,
        "sliding_window": WINDOW,
        "compress_ratios": list(size.ratios),
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_DIM,
        "index_topk": size.index_topk,
        "hc_mult": STREAMS,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "moe_intermediate_size": size.intermediate,
        "n_routed_experts": size.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": size.chosen,
        "num_hash_layers": size.hashed,
        "num_nextn_predict_layers": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "expert_dtype": "fp4",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "max_position_embeddings": size.length,
        "rope_theta": 10_000.0,
        "compress_rope_theta": 160_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": size.length // 16,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        },
    }


def write(
    directory: Path,
    writer: Writer | None = None,
) -> tuple[Path, Path]:
    """Write both forms below `directory`, by `writer`, which has nothing yet.

    Returns:
        The folders of the published form and of the float32 twin.
    """
    writer = writer or Writer(seed=0)
    whole_model(writer)
    published, twin = directory / "published", directory / "twin"
    described = writer.config()
    _save(published, described, writer.published)
    writer.write_tokenizer(published)
    plain = {k: v for k, v in described.items() if k != "quantization_config"}
    plain["torch_dtype"] = "float32"
    shared = {k: v for k, v in writer.twin.items() if writer.known_to_twin(k)}
    _save(twin, plain, shared)
    return published, twin


def _save(
    folder: Path, described: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(described, indent=1))
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})


def write_tokenizer(
    folder: Path, special: Mapping[str, int] = {}, others: Mapping[str, int] = {}
) -> None:
    """One token for each ASCII character, so that a grammar can be asked for, `special`
    ones, and `others` that no text has."""
    characters = {chr(code): code for code in range(VOCABULARY)}
    vocabulary = {**characters, **special, **others}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(list(special))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": chr(1)}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))


def whole_model(writer: Writer) -> None:
    """Write every tensor of the model and its draft."""
    size, hidden = writer.size, writer.size.hidden
    vocabulary = size.vocabulary
    writer.plain("embed.weight", writer.random(vocabulary, hidden))
    writer.plain("head.weight", writer.random(vocabulary, hidden, std=hidden**-0.5))
    writer.norm("norm", hidden)
    writer.output_head("")
    for layer, ratio in enumerate(size.ratios):
        decoder_layer(writer, f"layers.{layer}", ratio, hashed=layer < size.hashed)
    writer.draft()


def decoder_layer(writer: Writer, layer: str, ratio: int, hashed: bool) -> None:
    hidden = writer.size.hidden
    mixes, width = (2 + STREAMS) * STREAMS, STREAMS * hidden
    for part in ("attn", "ffn"):
        hc = f"{layer}.hc_{part}"
        fn = writer.random(mixes, width, std=width**-0.5)
        writer.plain(f"{hc}_fn", fn, torch.float32)
        writer.plain(f"{hc}_base", writer.random(mixes), torch.float32)
        writer.plain(f"{hc}_scale", writer.random(3, std=0.3, mean=1.0), torch.float32)
        writer.norm(f"{layer}.{part}_norm", hidden)
    writer.attention(f"{layer}.attn", ratio)
    writer.router(layer, hashed)
    writer.experts_of(layer)


def attention(writer: Writer, attn: str, ratio: int) -> None:
    """Window, compressor and indexer of DeepSeek-V4."""
    window(writer, attn)
    if ratio:
        _compressor(writer, f"{attn}.compressor", ratio, HEAD_DIM)
    if ratio == 4:
        indexer = f"{attn}.indexer"
        index_queries(writer, indexer, INDEX_HEADS)
        _compressor(writer, f"{indexer}.compressor", ratio, INDEX_DIM)


def window(writer: Writer, attn: str) -> None:
    """What attends to the window, and all layers have."""
    size, hidden = writer.size, writer.size.hidden
    writer.fp8(f"{attn}.wq_a", size.q_lora, hidden)
    writer.norm(f"{attn}.q_norm", size.q_lora)
    writer.fp8(f"{attn}.wq_b", size.heads * HEAD_DIM, size.q_lora)
    writer.fp8(f"{attn}.wkv", HEAD_DIM, hidden)
    writer.norm(f"{attn}.kv_norm", HEAD_DIM)
    grouped = size.groups * size.o_lora
    writer.fp8(f"{attn}.wo_a", grouped, size.heads * HEAD_DIM // size.groups)
    writer.fp8(f"{attn}.wo_b", hidden, grouped)
    sink = writer.random(size.heads, std=2.0, mean=2.0)
    writer.plain(f"{attn}.attn_sink", sink, torch.float32)


def index_queries(writer: Writer, indexer: str, heads: int) -> None:
    hidden = writer.size.hidden
    writer.fp8(f"{indexer}.wq_b", heads * INDEX_DIM, writer.size.q_lora)
    weights = writer.random(heads, hidden, std=hidden**-0.5)
    writer.plain(f"{indexer}.weights_proj.weight", weights)


def _compressor(writer: Writer, name: str, ratio: int, dim: int) -> None:
    width, hidden = dim * (2 if ratio == 4 else 1), writer.size.hidden
    for part in ("wkv", "wgate"):
        weight = writer.random(width, hidden, std=hidden**-0.5)
        writer.plain(f"{name}.{part}.weight", weight)
    writer.plain(f"{name}.ape", writer.random(ratio, width), torch.float32)
    writer.norm(f"{name}.norm", dim)


def tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a written checkpoint, by name."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 (it is no dict)
            yield name, file.get_tensor(name)


if __name__ == "__main__":
    print(*write(Path(sys.argv[1])), sep="\n")
