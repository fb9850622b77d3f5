# SPDX-License-Identifier: Apache-2.0
"""Where the installed vLLM keeps DeepSeek-V4, and how to build its real parts.

The one place that knows the layouts: the old one (`model_executor/`), the new one
(`models/deepseek_v4/`), and inside the new one the model with or without a folder
for XPU. Step tests ask here and never look at a version.
"""

import dataclasses
import importlib
import inspect
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import vllm

PACKAGE = Path(vllm.__file__).parent
NEW = (PACKAGE / "models/deepseek_v4").is_dir()
WITH_XPU_FOLDER = (PACKAGE / "models/deepseek_v4/xpu/model.py").is_file()

if NEW:
    ATTENTION = "vllm.models.deepseek_v4.attention"
    COMPRESSOR = "vllm.models.deepseek_v4.compressor"
    FOLDER = "xpu" if WITH_XPU_FOLDER else "nvidia"
    MODEL = f"vllm.models.deepseek_v4.{FOLDER}.model"
    MTP = f"vllm.models.deepseek_v4.{FOLDER}.mtp"
    OPS = "vllm.models.deepseek_v4.common.ops"
    FLASHMLA = "vllm.models.deepseek_v4.nvidia.flashmla"
    CPU = "vllm.models.deepseek_v4.cpu.cpu_mla"
    QUANTIZATION = "vllm.models.deepseek_v4.quant_config"
else:
    ATTENTION = "vllm.model_executor.layers.deepseek_v4_attention"
    COMPRESSOR = "vllm.model_executor.layers.deepseek_compressor"
    MODEL = "vllm.model_executor.models.deepseek_v4"
    MTP = "vllm.model_executor.models.deepseek_v4_mtp"
    OPS = "vllm.v1.attention.ops.deepseek_v4_ops"
    QUANTIZATION = MODEL
COMMON_OPS = "vllm.models.common.ops"
MLA = "vllm.v1.attention.backends.mla"
MHC = "vllm.model_executor.layers.mhc"
FUSED_MOE = "vllm.model_executor.layers.fused_moe"
LINEAR_KERNELS = "vllm.model_executor.kernels.linear"
LAYER_QUANTIZATION = "vllm.model_executor.layers.quantization"
# The packed formats for which XPU has a linear kernel, after the step at the latest.
PACKED_FORMATS = (
    ("nvfp4", "mxfp4")
    if (PACKAGE / "model_executor/kernels/linear/mxfp4/xpu.py").is_file()
    else ("nvfp4",)
)
INDEXER_BACKEND = f"{MLA}.indexer"
# Whether vllm-xpu-kernels has a batched FP8 product, and XPU takes it for wo_a.
O_PROJECTION_IN_FP8 = (
    "_prepare_bmm_params"
    in (PACKAGE / "model_executor/kernels/linear/scaled_mm/xpu.py").read_text()
)
# What the model of XPU calls of the hyper-connections inside a layer.
HYPER_CONNECTIONS = ["pre", "post"]
if (
    "mhc_fused_post_pre("
    in (PACKAGE.parent / f"{MODEL.replace('.', '/')}.py").read_text()
):
    HYPER_CONNECTIONS.append("fused")
# Who may multiply by FP8 weights in blocks on XPU.
BLOCK_FP8_BACKENDS = ["auto"] if WITH_XPU_FOLDER else ["auto", "xpu", "triton", "fp32"]

WINDOW = 128
HEADS = 8
MAX_MODEL_LEN = 4096
BLOCK_SIZE = 256
ROPE_THETA = 10_000.0
COMPRESS_ROPE_THETA = 160_000.0
YARN = {
    "rope_type": "yarn",
    "factor": 16,
    "original_max_position_embeddings": 256,
    "beta_fast": 32,
    "beta_slow": 1,
}
# Layer 0 sees its window alone; 1 and 2 also see entries compressed 4 and 128 to 1.
COMPRESS_RATIOS = (0, 4, 128)


def unchanged_with_xpu_folder(test: Any) -> Any:
    """Mark a test `unchanged` where upstream has an XPU path that does this right;
    elsewhere nothing does it before the step."""
    return pytest.mark.unchanged(test) if WITH_XPU_FOLDER else test


def module(name: str) -> ModuleType:
    """Import `name`; what the import raises is the caller's to judge."""
    return importlib.import_module(name)


def hf_config(heads: int = HEADS) -> Any:
    """A DeepSeek-V4 configuration of three small layers, its dicts not shared."""
    from vllm.transformers_utils.config import get_config

    with tempfile.TemporaryDirectory() as directory:
        write_config(Path(directory), heads)
        return get_config(directory, trust_remote_code=False)


def write_config(directory: Path, heads: int = HEADS) -> None:
    """Write `config.json` as a checkpoint of this size would carry it."""
    import json

    config = {
        "model_type": "deepseek_v4",
        "architectures": ["DeepseekV4ForCausalLM"],
        "vocab_size": 128,
        "hidden_size": 256,
        "num_hidden_layers": len(COMPRESS_RATIOS),
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 128,
        "o_groups": 2,
        "o_lora_rank": 128,
        "sliding_window": WINDOW,
        "compress_ratios": list(COMPRESS_RATIOS),
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
        "max_position_embeddings": MAX_MODEL_LEN,
        "rope_theta": ROPE_THETA,
        "compress_rope_theta": COMPRESS_ROPE_THETA,
        "rope_scaling": dict(YARN),
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    }
    (directory / "config.json").write_text(json.dumps(config))


def vllm_config(
    *,
    speculative_tokens: int = 0,
    quantized: bool = False,
    heads: int = HEADS,
    block_size: int = BLOCK_SIZE,
) -> Any:
    """A `VllmConfig` around `hf_config`, without a checkpoint or a tokenizer; its
    linear layers take bfloat16 weights, or FP8 in blocks where `quantized`. A page
    of the main cache has `block_size` tokens."""
    from vllm.config import CacheConfig, SchedulerConfig, VllmConfig

    scheduler = {
        "max_model_len": MAX_MODEL_LEN,
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
        max_model_len=MAX_MODEL_LEN,
        use_mla=True,
        is_moe=True,
        enforce_eager=True,
        is_deepseek_mla=True,
        quantization_config=None,
        get_num_attention_heads=lambda parallel: heads,
    )
    attention = config.attention_config
    if getattr(attention, "sparse_mla_prefill_workspace_factor", 0) is None:
        attention.sparse_mla_prefill_workspace_factor = 5
    if quantized:
        quantization = module(QUANTIZATION).DeepseekV4FP8Config
        config.quant_config = quantization.from_config(hf.quantization_config)
    if speculative_tokens:
        config.speculative_config = speculative_config(speculative_tokens)
    return config


def take_nvfp4(config: Any, leave_out: Sequence[str]) -> None:
    """Let the linear layers of `config` have NVFP4 weights as ModelOpt writes them,
    but for those whose names end like one of `leave_out`."""
    quantization = module(f"{LAYER_QUANTIZATION}.modelopt")
    config.quant_config = quantization.ModelOptNvFp4Config.from_config(
        {
            "quantization": {
                "quant_algo": "NVFP4",
                "kv_cache_quant_algo": None,
                "group_size": 16,
                "exclude_modules": [f"*{name}*" for name in leave_out],
            }
        }
    )


def take_mxfp4(config: Any, leave_out: Sequence[str]) -> None:
    """As `take_nvfp4`, but MXFP4 as compressed-tensors writes it."""
    quantization = module(f"{LAYER_QUANTIZATION}.compressed_tensors.compressed_tensors")
    values = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
    }
    group = {
        "targets": ["Linear"],
        "weights": {**values, "dynamic": False},
        "input_activations": {**values, "dynamic": True},
        "format": "mxfp4-pack-quantized",
    }
    config.quant_config = quantization.CompressedTensorsConfig.from_config(
        {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "config_groups": {"group_0": group},
            "ignore": [f"re:.*{name}$" for name in leave_out],
        }
    )


def take_mxfp4_indexer(config: Any) -> None:
    """Let the sparse indexer of `config` keep its keys in MXFP4 instead of FP8."""
    attention = config.attention_config
    if hasattr(attention, "use_fp4_indexer_cache"):
        attention.use_fp4_indexer_cache = True
    else:
        attention.indexer_kv_dtype = "mxfp4"


def speculative_config(tokens: int) -> Any:
    """A `SpeculativeConfig` of an MTP draft, which its constructor would want
    to load: only the fields that the layers and builders of a step test read."""
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


def another_platform(real: Any, capability: tuple[int, int] | None = None) -> Any:
    """`real` in all but two answers: it is not XPU, and it has this capability."""
    from vllm.platforms.interface import DeviceCapability

    class Another:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def is_xpu(self) -> bool:
            return False

        def get_device_capability(self, device_id: int = 0) -> Any:
            return capability and DeviceCapability(*capability)

    return Another()


def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the attention layer find a CUDA device of capability 9.0 for this test."""
    attention = module(ATTENTION)
    platform = another_platform(attention.current_platform, (9, 0))
    monkeypatch.setattr(attention, "current_platform", platform)
    monkeypatch.setattr(torch.cuda, "Event", object)


def attention_class() -> type[torch.nn.Module]:
    """The attention layer that the model of this platform builds."""
    model = module(MODEL)
    found = getattr(model, "DeepseekV4XPUAttention", None)
    return found or model.DeepseekV4Attention


def attention_layer(
    config: Any,
    compress_ratio: int,
    *,
    kind: type[torch.nn.Module] | None = None,
    aux_streams: list[Any] | None = None,
) -> Any:
    """The attention layer of one kind: 0 (window only), 4 or 128; of the class that
    the model builds, or of another `kind`, as `cuda_attention_class`."""
    layer = COMPRESS_RATIOS.index(compress_ratio)
    topk_indices = torch.empty(512, 512, dtype=torch.int32)
    with current(config):
        return (kind or attention_class())(
            config,
            prefix=f"model.layers.{layer}.attn",
            topk_indices_buffer=topk_indices,
            aux_stream_list=aux_streams,
        )


def decoder_layer(
    config: Any, compress_ratio: int, experts: type[torch.nn.Module]
) -> Any:
    """The model's whole layer of one kind, with `experts` for its routed experts: a
    class that takes the config and a prefix."""
    return _with_experts(
        module(MODEL).DeepseekV4DecoderLayer,
        config,
        COMPRESS_RATIOS.index(compress_ratio),
        experts,
    )


def draft_layer(config: Any, experts: type[torch.nn.Module]) -> Any:
    """The draft model's layer (multi-token prediction), as `decoder_layer`."""
    kind = module(MTP).DeepSeekV4MultiTokenPredictorLayer
    return _with_experts(kind, config, len(COMPRESS_RATIOS), experts)


def _with_experts(
    kind: Any, config: Any, layer: int, experts: type[torch.nn.Module]
) -> Any:
    topk_indices = torch.empty(512, 512, dtype=torch.int32)
    with current(config), pytest.MonkeyPatch.context() as patch:
        patch.setattr(module(MODEL), "DeepseekV4MoE", experts)
        return kind(
            config,
            prefix=f"model.layers.{layer}",
            topk_indices_buffer=topk_indices,
        )


def open_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attention and indexer be called as the Python functions that they are, and
    not by their names in `torch.ops`, which hide from tracing what they do."""
    for home, name in (
        (ATTENTION, "deepseek_v4_attention"),
        ("vllm.model_executor.layers.sparse_attn_indexer", "sparse_attn_indexer"),
    ):
        monkeypatch.setattr(torch.ops.vllm, name, getattr(module(home), name))


def input_projections(layer: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What a layer projects `hidden` to: (q rank and kv, kv and score of the
    compressor, those of the indexer's compressor, the indexer's head weights)."""
    owner = projecting(layer)
    for name in ("attn_gemm_parallel_execute", "_run_parallel_input_projections"):
        if hasattr(owner, name):
            projected: tuple[torch.Tensor, ...] = getattr(owner, name)(hidden)
            return projected
    raise AttributeError(f"{type(owner).__name__} has no input projections")


def projecting(layer: Any) -> Any:
    """The part of `layer` that projects, norms and rotates, and inserts keys."""
    return getattr(layer, "mla_attn", layer)


def attending(layer: Any) -> Any:
    """The part of `layer` that owns the caches and attends to them."""
    return getattr(projecting(layer), "mla_attn", projecting(layer))


def attend(layer: Any) -> Any:
    """Attention of `attending(layer)` as a function of q, kv, positions, output."""
    part = attending(layer)
    return getattr(part, "forward_mqa", part)


def unwired(layer: Any) -> Any:
    """As `attend`; on a tree whose layer does not call the modules of decode and
    prefill yet, those that are there."""
    part = attending(layer)
    names = ("xpu_sparse_decode", "xpu_sparse_prefill")
    files = PACKAGE / "v1/attention/backends/mla"
    present = [name for name in names if (files / f"{name}.py").is_file()]
    if not present or (files / "xpu_sparse_attention.py").is_file():
        return attend(layer)
    parts = {name: module(f"{MLA}.{name}") for name in present}
    return lambda q, kv, positions, output: _attend_by(parts, part, q, output)


def _attend_by(
    parts: dict[str, ModuleType], layer: Any, q: torch.Tensor, output: torch.Tensor
) -> None:
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    decode, prefill = parts["xpu_sparse_decode"], parts.get("xpu_sparse_prefill")
    if metadata is None:
        decode.decode_workspace(layer)
        if prefill:
            prefill.gather_workspace(layer)
        return
    window, own = metadata[layer.swa_cache_layer.prefix], metadata.get(layer.prefix)
    split = window.num_decode_tokens
    if split:
        decode.sparse_decode(layer, q[:split], window, own, output[:split])
    if prefill and window.num_prefill_tokens:
        prefill.sparse_prefill(layer, q[split:], window, own, output[split:])


def prefill_module(layer: Any) -> ModuleType:
    """The module that combines the indices of prefill."""
    name = f"{MLA}.xpu_sparse_prefill"
    if (PACKAGE / "v1/attention/backends/mla/xpu_sparse_prefill.py").is_file():
        return module(name)
    return module(type(layer).__module__)


def draft_model(config: Any) -> Any:
    """The MTP draft model of this platform, its weights not loaded."""
    with current(config):
        return module(MTP).DeepSeekV4MTP(vllm_config=config, prefix="draft")


def compressor(config: Any, *, indexer: bool, ratio: int = 4) -> Any:
    """The compressor of a layer, or of its `indexer`, from that layer."""
    layer = attention_layer(config, ratio)
    owner = layer.indexer if indexer else getattr(layer, "mla_attn", layer)
    return owner.compressor


def common_op(name: str) -> Any:
    """A Triton op that the platforms share: a function, in later releases an object
    that launches it; None where the release has none of that name."""
    for place in (OPS, f"{OPS}.{name}", f"{OPS}.fused_qk_rmsnorm", COMMON_OPS):
        try:
            found = module(place)
        except ModuleNotFoundError:
            found = None
        for attribute in (name, f"_{name.upper()}_KERNEL"):
            if callable(getattr(found, attribute, None)):
                return getattr(found, attribute)
    if name == "mtp_shared_head_rmsnorm":
        owner = module(f"{OPS}.fused_mtp_input_rmsnorm")
        return getattr(owner, name, None) or owner._MTP_SHARED_HEAD_RMSNORM_KERNEL
    return None


@contextmanager
def triton_indexer_query() -> Iterator[Any]:
    """`fused_indexer_q_rope_quant` with the Triton kernel that other platforms run;
    XPU of later releases has an op of its own."""
    found = module(f"{OPS}.fused_indexer_q")
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(found, "current_platform"):
            other = another_platform(found.current_platform)
            patch.setattr(found, "current_platform", other)
        yield found.fused_indexer_q_rope_quant


def o_projection(layer: Any, o: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The layer's inverse RoPE, grouped product with wo_a, and wo_b; where a wrapper
    does it, in its forward, with the attention replaced by its output `o`."""
    if WITH_XPU_FOLDER:
        return layer._o_proj(o, positions)
    wrapper = layer.mla_attn
    wrapper.wo_b = layer.wo_b

    def attention(hidden: torch.Tensor, at: torch.Tensor, out: Any, name: str) -> None:
        out[:, : o.shape[1]] = o

    hidden = torch.empty(len(o), wrapper.hidden_size, dtype=o.dtype, device=o.device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.vllm, "deepseek_v4_attention", attention)
        return wrapper(positions, hidden)


def cuda_attention_class() -> type[torch.nn.Module]:
    """The attention layer that CUDA builds from the same base."""
    return module(FLASHMLA).DeepseekV4FlashMLAAttention


def hyper_connections() -> Any:
    """What a layer and the model call, as `pre`, `post`, `fused` and `head`."""
    mhc = module(MHC)
    if hasattr(mhc, "MHCPreOp"):
        return SimpleNamespace(
            pre=mhc.MHCPreOp(),
            post=mhc.MHCPostOp(),
            fused=mhc.MHCFusedPostPreOp(),
            head=mhc.HCHeadOp(),
        )
    return SimpleNamespace(
        pre=torch.ops.vllm.mhc_pre,
        post=torch.ops.vllm.mhc_post,
        fused=torch.ops.vllm.mhc_fused_post_pre,
        head=module(MODEL).hc_head,
    )


def decoder_layers(config: Any, count: int, sublayer: type[torch.nn.Module]) -> Any:
    """Decoder layers of the model, with `sublayer` as their attention and experts."""
    model = module(MODEL)
    attention = attention_class().__name__
    with current(config), pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, attention, sublayer)
        patch.setattr(model, "DeepseekV4MoE", sublayer)
        layers = [
            model.DeepseekV4DecoderLayer(config, prefix=f"model.layers.{number}")
            for number in range(count)
        ]
    for layer in layers:
        for norm in (layer.attn_norm, layer.ffn_norm):
            norm._forward_method = norm.forward_native
    return layers


def run_layers(layers: Sequence[Any], x: torch.Tensor) -> torch.Tensor:
    """The residual streams `x`, `[T, 4, hidden]`, after the layers."""
    positions = torch.arange(len(x), device=x.device)
    state: tuple[Any, ...] = (None, None, None)
    for layer in layers:
        x, residual, *mixes = layer(x, positions, None, *state)
        state = (*mixes, residual)
    if residual is not None:
        x = layers[-1].hc_post(x, residual, *mixes)
    return x


@contextmanager
def linear_backend(config: Any, backend: str) -> Iterator[None]:
    """Linear layers made within are computed by `backend`, or by what is chosen for
    scales that are "fp32". Where a release has no such choice, its environment excludes
    the kernels before it."""
    fp8 = module("vllm.model_executor.layers.quantization.fp8")
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


def linear(config: Any, inputs: int, outputs: int, *, backend: str = "auto") -> Any:
    """A linear layer under the configuration's quantization, computed by `backend`."""
    layers = module("vllm.model_executor.layers.linear")
    dtype = module("vllm.utils.torch_utils").set_default_torch_dtype(torch.bfloat16)
    with linear_backend(config, backend), dtype:
        return layers.ReplicatedLinear(
            inputs,
            outputs,
            bias=False,
            quant_config=config.quant_config,
            prefix="model.layers.0.attn.wo_b",
        )


def mxfp4_experts(
    scales: Sequence[torch.Tensor],
    *,
    limit: float | None,
    activation: str,
    num_experts: int,
    topk: int,
    hidden: int,
    inter: int,
) -> Any:
    """The routed experts of XPU with MXFP4 weights, as a function of hidden
    states, w13, w2, top-k weights and top-k ids.

    `scales` are those of w13 and w2; `activation` is a name of `MoEActivation`.
    """
    moe = module(f"{FUSED_MOE}.config")
    oracle = module(f"{FUSED_MOE}.oracle.mxfp4")
    act = module(f"{FUSED_MOE}.activation").MoEActivation[activation]
    config = moe.FusedMoEConfig(
        num_experts=num_experts,
        experts_per_token=topk,
        hidden_dim=hidden,
        intermediate_size_per_partition=inter,
        num_local_experts=num_experts,
        num_logical_experts=num_experts,
        activation=act,
        device=device(),
        routing_method=moe.RoutingMethodType.Default,
        moe_parallel_config=moe.FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
    )
    backend = oracle.Mxfp4MoeBackend.XPU
    quantization = oracle.make_mxfp4_moe_quant_config(
        backend, w1_scale=scales[0], w2_scale=scales[1], swiglu_limit=limit
    )
    experts = oracle.backend_to_kernel_cls(backend)[0](config, quantization)

    def run(
        x: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> torch.Tensor:
        output = torch.empty_like(x)
        experts.apply(
            output=output,
            hidden_states=x,
            w1=w13,
            w2=w2,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=act,
            global_num_experts=num_experts,
            expert_map=None,
            a1q_scale=None,
            a2_scale=None,
            workspace13=torch.empty(0, device=x.device),
            workspace2=torch.empty(0, device=x.device),
            expert_tokens_meta=None,
            apply_router_weight_on_input=False,
        )
        return output

    return run


def cpu_window_builder(config: Any) -> Any:
    """The CPU backend's metadata builder of a layer's window cache."""
    cache = attention_layer(config, 0).swa_cache_layer
    builder = module(CPU).DeepseekV4CPUSparseSWAMetadataBuilder
    with current(config):
        return builder(
            cache.get_kv_cache_spec(config),
            [cache.prefix],
            config,
            torch.device("cpu"),
        )


def indexer_builder(config: Any, indexer: Any = None) -> Any:
    """The metadata builder of a ratio-4 layer's `indexer`, from that layer's spec."""
    backend = module(INDEXER_BACKEND)
    indexer = indexer or attention_layer(config, 4).indexer
    spec = indexer.k_cache.get_kv_cache_spec(config)
    arguments: dict[str, Any] = {
        "kv_cache_spec": spec,
        "layer_names": [indexer.k_cache.prefix],
        "vllm_config": config,
        "device": torch.device(device()),
    }
    builder = backend.DeepseekV32IndexerMetadataBuilder
    if getattr(builder, "requires_block_table_width", False):
        arguments["block_table_width"] = MAX_MODEL_LEN // BLOCK_SIZE
    with current(config):
        return builder(**arguments)


def device() -> str:
    """The device that vLLM's platform names: `xpu`, or `cpu` where it is emulated."""
    from vllm.platforms import current_platform

    return current_platform.device_type


def workspace() -> Any:
    """The workspace manager of vLLM, new and empty, as a worker makes it."""
    manager = module("vllm.v1.worker.workspace")
    manager.reset_workspace_manager()
    manager.init_workspace_manager(torch.device(device()))
    return manager.current_workspace_manager()


def common_metadata(
    seq_lens: Sequence[int], query_lens: Sequence[int], block_size: int = BLOCK_SIZE
) -> Any:
    """`CommonAttentionMetadata` of requests with these lengths, in tokens.

    Request i owns the blocks i·n + 1 to (i + 1)·n of its block table, and each new
    token's slot follows from its position.
    """
    from vllm.v1.attention.backend import CommonAttentionMetadata

    width = MAX_MODEL_LEN // block_size
    requests = len(seq_lens)
    starts = torch.zeros(requests + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(query_lens, dtype=torch.int32).cumsum(0)
    table = torch.arange(1, requests * width + 1, dtype=torch.int32).view(-1, width)
    positions = torch.cat(
        [
            torch.arange(total - new, total)
            for total, new in zip(seq_lens, query_lens, strict=True)
        ]
    )
    owner = torch.repeat_interleave(torch.arange(requests), torch.tensor(query_lens))
    blocks = table[owner, positions // block_size].to(torch.int64)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    values = {
        "query_start_loc": starts.to(device()),
        "query_start_loc_cpu": starts,
        "seq_lens": lengths.to(device()),
        "seq_lens_cpu_upper_bound": lengths,
        "num_reqs": requests,
        "num_actual_tokens": int(starts[-1]),
        "max_query_len": max(query_lens),
        "max_seq_len": max(seq_lens),
        "block_table_tensor": table.to(device()),
        "slot_mapping": (blocks * block_size + positions % block_size).to(device()),
        "positions": positions.to(device()),
        "_seq_lens_cpu": lengths,
    }
    known = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    return CommonAttentionMetadata(
        **{key: value for key, value in values.items() if key in known}
    )
