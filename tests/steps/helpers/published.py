# SPDX-License-Identifier: Apache-2.0
"""Every kind of tensor that a checkpoint of DeepSeek-V4, its image model, V4.1 or their
drafts has.

All sizes differ, and no block or group divides them: a size in place of another, or a
block of one element more, gives another shape.
"""

import importlib.util
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from . import layout

CHECKS = "vllm_xpu_dsv4.checkpoint_tensors"
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu
OWN = {"quant_method": "fp8", "weight_block_size": [128, 128]}
Shape = tuple[int, ...]

_TEXT = {
    "n_routed_experts": 4,
    "compress_ratios": [0, 4, 128, 4],
    "hidden_size": 258,
    "head_dim": 171,
    "index_head_dim": 65,
    "index_n_heads": 2,
    "moe_intermediate_size": 386,
    "n_shared_experts": 3,
    "q_lora_rank": 129,
    "num_attention_heads": 3,
    "o_groups": 3,
    "o_lora_rank": 45,
}
# As Transformers keeps the ratios.
_KINDS_OF_LAYERS = {
    "layer_types": ["window", "c4a", "c128a", "c4a"],
    "compress_rates": {"c4a": 4, "c128a": 128},
}
_TOWER = {
    "vision_dim": 40,
    "vision_inter_dim": 56,
    "vision_downsample_ratio": 3,
    "vision_patch_size": 5,
}
_ENGRAM = {
    "kv_source_layer_ids": [1, 2],
    "engram_layer_ids": [1, 3],
    "engram_num_embeddings": [70, 90],
    "engram_head_dim": 33,
    "engram_max_ngram_size": 3,
    "engram_n_heads": 2,
    "hc_mult": 4,
}
MODELS: dict[str, dict[str, Any]] = {
    "V4": _TEXT,
    "V4 of Transformers": _TEXT | {"compress_ratios": None} | _KINDS_OF_LAYERS,
    "Vision": _TEXT | _TOWER,
    "V4.1": _TEXT | _TOWER | _ENGRAM,
}
KINDS: dict[str, dict[str, Any]] = {
    "own": {"expert_dtype": "fp4", "quantization_config": OWN},
    "FP8 experts": {"expert_dtype": "fp8", "quantization_config": OWN},
    "NVFP4 experts": {
        "quantization_config": OWN | {"moe_quant_algo": "NVFP4", "ignore": ["mtp.1*"]}
    },
    "MXFP4 experts alone": {"quantization_config": {"quant_method": "mxfp4"}},
    "16 bits": {},
}
"""What a `config.json` says of the quantization. NVFP4 has the model's experts, and
those of the draft's first stage; the second's are as DeepSeek publishes them."""
CHECKPOINTS = [
    *(("V4", kind) for kind in KINDS),
    *((model, "own") for model in MODELS if model != "V4"),
]

_LINEARS = {
    "attn.wq_a": (129, 258),
    "attn.wq_b": (513, 129),
    "attn.wkv": (171, 258),
    "attn.wo_a": (135, 171),
    "attn.wo_b": (258, 135),
    "ffn.shared_experts.w1": (1158, 258),
    "ffn.shared_experts.w2": (258, 1158),
    "ffn.shared_experts.w3": (1158, 258),
}
_EXPERT = {"w1": (386, 258), "w2": (258, 386), "w3": (386, 258)}
_IMAGES: dict[str, Shape] = {
    "vision.patch_embed.proj.weight": (40, 75),
    "vision.patch_embed.proj.bias": (40,),
    "vision.norm.weight": (40,),
    "aligner.w1.weight": (258, 360),
    "aligner.w1.bias": (258,),
    "aligner.w2.weight": (258, 258),
    "aligner.w2.bias": (258,),
    "image_start": (258,),
    "image_pad": (258,),
    "image_newline": (258,),
    "image_end": (258,),
    **{
        f"vision.blocks.{block}.{name}": shape
        for block in (0, 12)
        for name, shape in {
            "norm1.weight": (40,),
            "attn.wqkv.weight": (120, 40),
            "attn.wqkv.bias": (120,),
            "attn.wo.weight": (40, 40),
            "attn.wo.bias": (40,),
            "norm2.weight": (40,),
            "mlp.w1.weight": (112, 40),
            "mlp.w2.weight": (40, 56),
        }.items()
    },
}


def config(model: str, **more: Any) -> Any:
    """The fields of `config.json` that a check of tensors reads."""
    return SimpleNamespace(**MODELS[model] | more)


def linears(model: str) -> dict[str, Shape]:
    """Rows and columns of the layers that DeepSeek quantizes, experts aside."""
    found: dict[str, Shape] = {
        f"{owner}.{name}": shape
        for owner in ("layers.1", "mtp.1")
        for name, shape in _LINEARS.items()
    }
    found["layers.1.attn.indexer.wq_b"] = (130, 129)
    found["mtp.1.e_proj"] = found["mtp.1.h_proj"] = (258, 258)
    if model == "V4.1":
        found["layers.1.engram.wkv"] = (1290, 132)
        found["layers.1.engram.embed"] = (70, 33)
        found["layers.3.engram.embed"] = (90, 33)
    return found


def experts() -> dict[str, Shape]:
    return {
        f"{owner}.ffn.experts.3.{name}": shape
        for owner in ("layers.1", "mtp.1")
        for name, shape in _EXPERT.items()
    }


def whole(model: str) -> dict[str, torch.Tensor]:
    """What is quantized in no checkpoint of DeepSeek's."""
    both = 171 if model == "V4.1" else 342
    shapes: dict[str, Shape] = {
        "layers.1.attn.compressor.wkv.weight": (both, 258),
        "layers.1.attn.compressor.wgate.weight": (both, 258),
        "layers.2.attn.compressor.wkv.weight": (171, 258),
        "layers.2.attn.compressor.wgate.weight": (171, 258),
        "layers.1.attn.indexer.compressor.wkv.weight": (both * 65 // 171, 258),
        "layers.1.attn.attn_sink": (3,),
        "mtp.1.attn.attn_sink": (3,),
    }
    if model in ("Vision", "V4.1"):
        shapes |= _IMAGES
    tensors = {name: torch.ones(shape) for name, shape in shapes.items()}
    table = torch.tensor([[0, 3], [2, 1]])
    return tensors | {"layers.1.ffn.gate.tid2eid": table}


def of_any_shape() -> dict[str, torch.Tensor]:
    """Tensors that a parameter takes in one shape alone, or whose shape the draft's
    configuration knows."""
    names = ("layers.1.attn_norm", "layers.1.ffn.gate", "mtp.1.enorm")
    return {f"{name}.weight": torch.ones(7) for name in names}


def _packed(name: str, shape: Shape, each: Shape) -> Iterator[tuple[str, torch.Tensor]]:
    """A weight with E8M0 scales: MXFP4 where a scale is for 32 of one row of an expert,
    else FP8."""
    mxfp4 = ".experts." in name and each == (1, 32)
    stored, dtype = (_per(shape, (1, 2)), torch.int8) if mxfp4 else (shape, E4M3)
    yield f"{name}.weight", torch.ones(stored).to(dtype)
    yield f"{name}.scale", torch.ones(_per(shape, each)).to(E8M0)


def _per(shape: Shape, each: Shape) -> Shape:
    return tuple(-(-size // one) for size, one in zip(shape, each, strict=True))


def _nvfp4(name: str, shape: Shape) -> Iterator[tuple[str, torch.Tensor]]:
    rows, columns = shape
    yield f"{name}.weight", torch.ones(rows, columns // 2).byte()
    yield f"{name}.weight_scale", torch.ones(rows, columns // 16).to(E4M3)
    yield f"{name}.weight_scale_2", torch.ones(())
    yield f"{name}.input_scale", torch.ones(())


def tensors(model: str, kind: str) -> dict[str, torch.Tensor]:
    """Such a checkpoint: layers of the model and of its draft."""
    square = (32, 32) if model == "V4.1" else (128, 128)
    own = kind in ("own", "FP8 experts", "NVFP4 experts")
    found = whole(model) | of_any_shape()
    for name, shape in linears(model).items():
        if own:
            each = (1, 32) if name.endswith("embed") else square
            found.update(_packed(name, shape, each))
        else:
            found[f"{name}.weight"] = torch.ones(shape).to(BF16)
    for name, shape in experts().items():
        if kind == "16 bits":
            found[f"{name}.weight"] = torch.ones(shape).to(BF16)
        elif converted(name, kind):
            found.update(_nvfp4(name, shape))
            found.update(_nvfp4(name.replace("layers.1", "mtp.0"), shape))
        else:
            found.update(_packed(name, shape, square if kind[:3] == "FP8" else (1, 32)))
    if own:
        # As wide as the draft's configuration says.
        found.update(_packed("mtp.1.main_proj", (258, 774), square))
    return found


def converted(name: str, kind: str) -> bool:
    """Whether a tensor is in NVFP4."""
    return kind == "NVFP4 experts" and ".experts." in name and "mtp.1" not in name


def others(name: str, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """What must not come in place of a tensor: one row or column more or less, and
    dtypes that no parameter takes as they are."""
    shape = tensor.shape
    free = (*of_any_shape(), "mtp.1.main_proj", "layers.1.ffn.gate.tid2eid")
    if not name.startswith(free) and tensor.numel() > 1:
        for axis in range(len(shape)):
            for more in (-1, 1):
                other = [size + more * (axis == at) for at, size in enumerate(shape)]
                yield torch.ones(other).to(tensor.dtype)
    for dtype in (torch.float64, torch.float8_e5m2, torch.int16):
        yield torch.ones(shape).to(dtype)


def checked(
    model: Any, given: Iterable[tuple[str, torch.Tensor]], *, of_draft: bool = False
) -> Iterable[tuple[str, torch.Tensor]]:
    """The same tensors as a wheel's loader gives them to a model, if it has one."""
    if importlib.util.find_spec("vllm_xpu_dsv4") is None:
        return given
    check = layout.module(CHECKS).check_tensors
    found: Iterable[tuple[str, torch.Tensor]] = check(
        model.config, given, of_draft=of_draft
    )
    return found


def passed(told: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What comes through the checks of the model and of its draft, one after another.

    Raises:
        ValueError: one refuses a tensor.

    """
    check = layout.module(CHECKS).check_tensors
    return dict(check(told, check(told, iter(given.items())), of_draft=True))


def refusal(told: Any, name: str, tensor: torch.Tensor) -> str:
    """What is said to a tensor; empty where it passes."""
    try:
        passed(told, {name: tensor})
    except ValueError as error:
        return str(error)
    return ""
