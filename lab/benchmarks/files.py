# SPDX-License-Identifier: Apache-2.0
"""The kernel files of upstream's releases that aot compiles and benchmarks measure."""

FLASHMLA_FOLDER, WHEEL_FOLDER = "flashmla", "wheel-0.33.0"
"""What `lab.benchmarks.prepare` takes from CUDA wheels."""
ATTENTION = "vllm/v1/attention/ops/xpu_mla_sparse.py"
DECODE = "vllm/models/deepseek_v4/xpu/xpu_sparse_decode_fp8.py"
INSERT = "vllm/models/deepseek_v4/xpu/xpu_qnorm_rope_kv_fp8_insert.py"
XPU = (ATTENTION, DECODE, INSERT)
SHARED_NORM = "vllm/models/common/ops/fused_qk_rmsnorm.py"
MHC = "vllm/model_executor/kernels/mhc/torch.py"
WARMUP = (
    "vllm/model_executor/warmup/jit_warmup.py",
    "vllm/model_executor/warmup/jit_warmup_triton_helper.py",
)
OPS = (
    "cache_utils",
    "fused_compress_quant_cache",
    "fused_indexer_q",
    "fused_inv_rope_fp8_quant",
)
"""Common ops that every release has."""


def _common(*names: str) -> tuple[str, ...]:
    """Common ops."""
    return tuple(f"vllm/models/deepseek_v4/common/ops/{name}.py" for name in names)


V41_COMPRESS = "vllm/models/deepseek_v41/common/ops/fused_compress_quant_cache.py"
V41_INDEXER_KEYS = "vllm/models/deepseek_v41/common/ops/indexer_k_store.py"
V41_CANDIDATES = "vllm/model_executor/kernels/attention/dsa/candidate_blocks.py"
(COMPRESSOR,) = _common("fused_compress_quant_cache")
FILES: dict[str, tuple[str, ...]] = {
    "0.22.1": _common(*OPS, "fused_qk_rmsnorm", "save_partial_states"),
    "0.33.0": (
        *XPU,
        *_common(*OPS, "fused_mtp_input_rmsnorm", "save_partial_states"),
        SHARED_NORM,
        MHC,
        V41_COMPRESS,
        V41_INDEXER_KEYS,
        V41_CANDIDATES,
        *WARMUP,
    ),
}
"""Kernel files by release, as paths inside its sdist."""
