# SPDX-License-Identifier: Apache-2.0
"""Configurations of a small DeepSeek-V4, as vLLM reads them from a checkpoint."""

import inspect
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from . import layout


def hf_config(heads: int = layout.HEADS) -> Any:
    """A DeepSeek-V4 configuration of three small layers; each call returns new
    dicts."""
    from vllm.transformers_utils.config import get_config

    with tempfile.TemporaryDirectory() as directory:
        write_config(Path(directory), heads)
        return get_config(directory, trust_remote_code=False)


def write_config(directory: Path, heads: int = layout.HEADS) -> None:
    """Write `config.json` as a checkpoint of this size would carry it."""
    import json

    config = {
        "model_type": "deepseek_v4",
        "architectures": ["DeepseekV4ForCausalLM"],
        "vocab_size": 128,
        "hidden_size": 256,
        "num_hidden_layers": len(layout.COMPRESS_RATIOS),
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 128,
        "o_groups": 2,
        "o_lora_rank": 128,
        "sliding_window": layout.WINDOW,
        "compress_ratios": list(layout.COMPRESS_RATIOS),
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "moe_intermediate_size": 128,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "num_hash_layers": 0,
        "num_nextn_predict_layers": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "expert_dtype": "fp4",
        "max_position_embeddings": layout.MAX_MODEL_LEN,
        "rope_theta": layout.ROPE_THETA,
        "compress_rope_theta": layout.COMPRESS_ROPE_THETA,
        "rope_scaling": dict(layout.YARN),
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    }
    (directory / "config.json").write_text(json.dumps(config))


def engine_config(folder: Path, fields: dict[str, Any], **options: Any) -> Any:
    """The configuration of a server, as `EngineArgs` makes it of a `config.json` in
    `folder` with other `fields`."""
    import json

    write_config(folder)
    written = folder / "config.json"
    written.write_text(json.dumps(json.loads(written.read_text()) | fields))
    arguments = layout.module("vllm.engine.arg_utils").EngineArgs
    served = {"skip_tokenizer_init": True, "max_model_len": 512} | options
    return arguments(model=str(folder), **served).create_engine_config()


VISION = {
    "vocab_size": 129_280,
    "vision_n_layers": 2,
    "vision_dim": 128,
    "vision_n_heads": 2,
    "vision_inter_dim": 256,
    "vision_patch_size": 14,
    "vision_rope_theta": 10_000.0,
    "vision_downsample_ratio": 3,
    "vision_max_n_token": 256,
    "vision_min_pixels": 0,
    "vision_max_wh_ratio": 8,
}
"""What the configuration of V4 Vision has besides: a small tower, images of at most 256
tokens, and the vocabulary whose last tokens stand for parts of an image."""


def take_images(config: Any) -> None:
    """Let the model of `config` be V4 Vision."""
    # What vLLM's own class of older releases makes of them.
    derived = {
        "mm_prefix_clamp_sliding_window": True,
        "mm_prefix_span_leading_pad_modulus": 4,
    }
    for name, value in (VISION | derived).items():
        setattr(config.model_config.hf_config, name, value)


def vllm_config(
    *,
    speculative_tokens: int = 0,
    quantized: bool = False,
    heads: int = layout.HEADS,
    block_size: int = layout.BLOCK_SIZE,
) -> Any:
    """A `VllmConfig` around `hf_config`, without a checkpoint or a tokenizer; its
    linear layers take bfloat16 weights, or FP8 in blocks where `quantized`. A page
    of the main cache has `block_size` tokens."""
    from vllm.config import CacheConfig, SchedulerConfig, VllmConfig

    scheduler = {
        "max_model_len": layout.MAX_MODEL_LEN,
        "is_encoder_decoder": False,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 16,
    }
    known = inspect.signature(SchedulerConfig).parameters
    config = VllmConfig(
        cache_config=CacheConfig(block_size=block_size, cache_dtype="fp8"),
        scheduler_config=SchedulerConfig(
            **{key: value for key, value in scheduler.items() if key in known}
        ),
    )
    config.model_config = SimpleNamespace(
        hf_config=(hf := hf_config(heads)),
        hf_text_config=hf,
        architectures=hf.architectures,
        dtype=torch.bfloat16,
        head_dtype=torch.bfloat16,
        max_model_len=layout.MAX_MODEL_LEN,
        use_mla=True,
        is_moe=True,
        enforce_eager=True,
        is_deepseek_mla=True,
        quantization_config=None,
        logits_processors=None,
        is_diffusion=False,
        enable_prompt_embeds=False,
        runner_type="generate",
        get_num_attention_heads=lambda parallel: heads,
    )
    attention = config.attention_config
    if getattr(attention, "sparse_mla_prefill_workspace_factor", 0) is None:
        attention.sparse_mla_prefill_workspace_factor = 5
    if quantized:
        quantization = layout.module(layout.QUANTIZATION).DeepseekV4FP8Config
        config.quant_config = quantization.from_config(hf.quantization_config)
    if speculative_tokens:
        config.speculative_config = speculative_config(speculative_tokens)
    return config


def take_nvfp4(config: Any, leave_out: Sequence[str], algorithm: str = "NVFP4") -> None:
    """Let the linear layers of `config` have NVFP4 weights as ModelOpt writes them,
    but for those whose names end like one of `leave_out`."""
    quantization = layout.module(f"{layout.LAYER_QUANTIZATION}.modelopt")
    config.quant_config = quantization.ModelOptNvFp4Config.from_config(
        {
            "quantization": {
                "quant_algo": algorithm,
                "kv_cache_quant_algo": None,
                "group_size": 16,
                "exclude_modules": [f"*{name}*" for name in leave_out],
            }
        }
    )


def take_packed(config: Any, kind: str, leave_out: Sequence[str]) -> None:
    """As `take_nvfp4`, but as compressed-tensors writes it: "mxfp4-pack-quantized",
    or of weights alone "nvfp4-pack-quantized" and INT4's "pack-quantized"."""
    quantization = layout.module(
        f"{layout.LAYER_QUANTIZATION}.compressed_tensors.compressed_tensors"
    )
    mxfp4 = kind.startswith("mxfp4")
    group_size = {"mxfp4-pack-quantized": 32, "nvfp4-pack-quantized": 16}.get(kind, 128)
    values = {
        "num_bits": 4,
        "type": "int" if kind == "pack-quantized" else "float",
        "strategy": "tensor_group" if kind.startswith("nvfp4") else "group",
        "group_size": group_size,
        "symmetric": True,
    }
    group = {
        "targets": ["Linear"],
        "weights": {**values, "dynamic": False},
        "input_activations": {**values, "dynamic": True} if mxfp4 else None,
        "format": kind,
    }
    config.quant_config = quantization.CompressedTensorsConfig.from_config(
        {
            "quant_method": "compressed-tensors",
            "format": kind,
            "config_groups": {"group_0": group},
            "ignore": [f"re:.*{name}$" for name in leave_out],
        }
    )


def take_auto_round(config: Any, leave_out: Sequence[str]) -> None:
    """As `take_nvfp4`, but INT4 as AutoRound writes it for Intel's checkpoints."""
    quantization = layout.module(f"{layout.LAYER_QUANTIZATION}.inc")
    config.quant_config = quantization.INCConfig.from_config(
        {
            "quant_method": "auto-round",
            "bits": 4,
            "data_type": "int",
            "group_size": 128,
            "sym": True,
            "packing_format": "auto_round:auto_gptq",
            "extra_config": {
                f".*{name}$": {"bits": 16, "data_type": "float"} for name in leave_out
            },
        }
    )


def take_mxfp4_indexer(config: Any) -> None:
    """Let the sparse indexer of `config` keep its keys in MXFP4 instead of FP8."""
    attention = config.attention_config
    if hasattr(attention, "resolve_indexer_kv_dtype"):
        attention.indexer_kv_dtype = "mxfp4"
    else:
        attention.use_fp4_indexer_cache = True


def speculative_config(tokens: int) -> Any:
    """A `SpeculativeConfig` of an MTP draft with only the fields that the layers and
    builders of a step test read. Its constructor would load a draft model."""
    from vllm.config import SpeculativeConfig

    speculation = object.__new__(SpeculativeConfig)
    fields = {
        "method": "mtp",
        "num_speculative_tokens": tokens,
        "parallel_drafting": False,
        "enable_adaptive_verification": False,
        "draft_model_config": SimpleNamespace(hf_config=hf_config()),
    }
    for name, value in fields.items():
        object.__setattr__(speculation, name, value)
    return speculation


@contextmanager
def current(config: Any) -> Iterator[None]:
    """`config` as vLLM's current configuration, in a world of one rank."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            directory = tempfile.mkdtemp()
            parallel_state.init_distributed_environment(
                world_size=1,
                rank=0,
                local_rank=0,
                distributed_init_method=f"file://{directory}/store",
                backend="gloo",
            )
            parallel_state.initialize_model_parallel()
        yield


@contextmanager
def linear_backend(config: Any, backend: str) -> Iterator[None]:
    """Linear layers made within are computed by `backend`, or by what is chosen for
    scales that are "fp32". Where a release has no such choice, its environment excludes
    the kernels before it."""
    fp8 = layout.module("vllm.model_executor.layers.quantization.fp8")
    if backend == "fp32":
        backend = "auto"
        config.quant_config = fp8.Fp8Config(
            is_checkpoint_fp8_serialized=True, weight_block_size=[128, 128]
        )
    before = {
        "auto": "",
        "xpu": "XPUW8A16Fp8BlockKernel",
        "triton": "XPUW8A16Fp8BlockKernel,XPUFp8BlockScaledMMKernel",
    }
    with current(config), pytest.MonkeyPatch.context() as patch:
        if hasattr(config.kernel_config, "linear_backend"):
            patch.setattr(config.kernel_config, "linear_backend", backend)
        else:
            patch.setenv("VLLM_DISABLED_KERNELS", before[backend])
        yield
