# SPDX-License-Identifier: Apache-2.0
"""The kernel files of upstream's releases that aot compiles and benchmarks measure."""

ATTENTION = "vllm/v1/attention/ops/xpu_mla_sparse.py"
DECODE = "vllm/models/deepseek_v4/xpu/xpu_sparse_decode_fp8.py"
INSERT = "vllm/models/deepseek_v4/xpu/xpu_qnorm_rope_kv_fp8_insert.py"
COMMON = "vllm/models/deepseek_v4/common/ops/"
OLD_COMMON = "vllm/v1/attention/ops/deepseek_v4_ops/"
CACHE_UTILS = f"{COMMON}cache_utils.py"
SHARED_NORM = "vllm/models/common/ops/fused_qk_rmsnorm.py"
MHC = "vllm/model_executor/kernels/mhc/torch.py"
WARMUP = (
    "vllm/model_executor/warmup/jit_warmup.py",
    "vllm/model_executor/warmup/jit_warmup_triton_helper.py",
)
FILES: dict[str, tuple[str, ...]] = {
    "0.21.0": (
        f"{OLD_COMMON}cache_utils.py",
        f"{OLD_COMMON}fused_compress_quant_cache.py",
        f"{OLD_COMMON}fused_indexer_q.py",
        f"{OLD_COMMON}fused_inv_rope_fp8_quant.py",
        f"{OLD_COMMON}fused_qk_rmsnorm.py",
    ),
    "0.22.1": (
        CACHE_UTILS,
        f"{COMMON}fused_compress_quant_cache.py",
        f"{COMMON}fused_indexer_q.py",
        f"{COMMON}fused_inv_rope_fp8_quant.py",
        f"{COMMON}fused_qk_rmsnorm.py",
        f"{COMMON}save_partial_states.py",
    ),
    "0.23.0": (
        ATTENTION,
        DECODE,
        INSERT,
        CACHE_UTILS,
        f"{COMMON}fused_compress_quant_cache.py",
        f"{COMMON}fused_indexer_q.py",
        f"{COMMON}fused_inv_rope_fp8_quant.py",
        f"{COMMON}fused_mtp_input_rmsnorm.py",
        f"{COMMON}fused_qk_rmsnorm.py",
        f"{COMMON}save_partial_states.py",
    ),
    "0.33.0": (
        ATTENTION,
        DECODE,
        INSERT,
        CACHE_UTILS,
        f"{COMMON}fused_compress_quant_cache.py",
        f"{COMMON}fused_indexer_q.py",
        f"{COMMON}fused_inv_rope_fp8_quant.py",
        f"{COMMON}fused_mtp_input_rmsnorm.py",
        f"{COMMON}save_partial_states.py",
        SHARED_NORM,
        MHC,
        *WARMUP,
    ),
}
"""Kernel files by release, as paths inside its sdist."""
