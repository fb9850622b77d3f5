# SPDX-License-Identifier: Apache-2.0
"""Where the installed vLLM keeps DeepSeek-V4.

The one place that knows the layouts: `models/deepseek_v4/` with or without a folder
for XPU. `model_configs`, `model_layers`, `layer_parts` and `batch_metadata` build the
real parts from what it says. Step tests ask these and never look at a version.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import vllm
from packaging.version import Version

PACKAGE = Path(vllm.__file__).parent
RELEASE = Version(vllm.__version__).release[:2]
"""What to expect follows from it, never from the text of the tree: a step that takes
away what a test looks for must not change what the test wants."""
# A model of its own for XPU, with DSpark's draft; before, one serves all platforms.
WITH_XPU_FOLDER = RELEASE >= (0, 26)

ATTENTION = "vllm.models.deepseek_v4.attention"
COMPRESSOR = "vllm.models.deepseek_v4.compressor"
FOLDER = "xpu" if WITH_XPU_FOLDER else "nvidia"
MODEL = f"vllm.models.deepseek_v4.{FOLDER}.model"
MTP = f"vllm.models.deepseek_v4.{FOLDER}.mtp"
DSPARK = f"vllm.models.deepseek_v4.{FOLDER}.dspark"
OPS = "vllm.models.deepseek_v4.common.ops"
CPU = "vllm.models.deepseek_v4.cpu.cpu_mla"
QUANTIZATION = "vllm.models.deepseek_v4.quant_config"
COMMON_OPS = "vllm.models.common.ops"
MLA = "vllm.v1.attention.backends.mla"
MHC = "vllm.model_executor.layers.mhc"
FUSED_MOE = "vllm.model_executor.layers.fused_moe"
LINEAR_KERNELS = "vllm.model_executor.kernels.linear"
LAYER_QUANTIZATION = "vllm.model_executor.layers.quantization"
INDEXER_BACKEND = f"{MLA}.indexer"
# Who plans the pages of all layers.
CACHE_PLANNING = "vllm.v1.core.kv_cache_" + (
    "planning" if RELEASE >= (0, 33) else "utils"
)
# vllm-xpu-kernels has a batched FP8 product, and XPU takes it for wo_a. Before, XPU
# took ROCm's path, which undoes RoPE in one launch and keeps wo_a in BF16 from the
# first call on.
O_PROJECTION_IN_FP8 = RELEASE >= (0, 31)
O_PROJECTION_IN_BF16 = WITH_XPU_FOLDER and not O_PROJECTION_IN_FP8
# What the model calls of the hyper-connections inside a layer.
HYPER_CONNECTIONS = ("pre", "post", "fused")
# Who may multiply by FP8 weights in blocks on XPU. The op's product with scales of 32
# values came to vllm-xpu-kernels together with that of FP4.
BLOCK_FP8_BACKENDS = ["auto", "triton", "fp32"]
if not WITH_XPU_FOLDER and hasattr(torch.ops._xpu_C, "fp4_gemm"):
    BLOCK_FP8_BACKENDS.append("xpu")
# Torch may; on a CPU it does not.
TORCH_BLOCK_FP8 = ["torch"] if RELEASE >= (0, 31) else []

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
    """Mark a test `unchanged` where upstream's XPU path is already right. Elsewhere it
    fails before the step."""
    return pytest.mark.unchanged(test) if WITH_XPU_FOLDER else test


def unchanged_since(*release: int) -> Callable[[Any], Any]:
    """Mark a test `unchanged` from an upstream release on, which is right since."""
    return pytest.mark.unchanged if release <= RELEASE else lambda test: test


def module(name: str) -> ModuleType:
    """Import `name`. Errors of the import reach the caller."""
    return importlib.import_module(name)


def another_platform(
    real: Any, capability: tuple[int, int] | None = None, *, rocm: bool = False
) -> Any:
    """`real` in all but four answers: it is neither XPU nor CPU, it is or is not ROCm,
    and it has this capability."""
    from vllm.platforms.interface import DeviceCapability

    class Another:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def is_xpu(self) -> bool:
            return False

        def is_cpu(self) -> bool:
            return False

        def is_rocm(self) -> bool:
            return rocm

        def get_device_capability(self, device_id: int = 0) -> Any:
            return capability and DeviceCapability(*capability)

    return Another()


def pretend_cuda(monkeypatch: pytest.MonkeyPatch, *, rocm: bool = False) -> None:
    """Let the attention layer find a CUDA device of capability 9.0, or ROCm's of 9.4,
    for this test."""
    attention = module(ATTENTION)
    capability = (9, 4) if rocm else (9, 0)
    platform = another_platform(attention.current_platform, capability, rocm=rocm)
    monkeypatch.setattr(attention, "current_platform", platform)


@contextmanager
def worker() -> Iterator[None]:
    """Set `torch.cuda` as XPU's model runner does for the life of a worker, in which
    every model is built: its streams and events are those of XPU. On a CPU, layers are
    built as for CUDA, unless the test names another platform."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        with pytest.MonkeyPatch.context() as patch:
            for kind in (torch.cuda, torch.xpu):
                patch.setattr(kind, "Event", object)
            patch.setattr(current_platform, "num_compute_units", lambda *_: 1)
            found = getattr(module(ATTENTION), "current_platform", None)
            if found is current_platform:
                pretend_cuda(patch)
            yield
        return
    runner = module("vllm.v1.worker.xpu_model_runner")
    before = dict(vars(torch.cuda))
    try:
        with runner._torch_cuda_wrapper():
            yield
    finally:
        vars(torch.cuda).update(before)


def prefill_module(layer: Any) -> ModuleType:
    """The module that combines the indices of prefill."""
    name = f"{MLA}.xpu_sparse_prefill"
    if (PACKAGE / "v1/attention/backends/mla/xpu_sparse_prefill.py").is_file():
        return module(name)
    return module(type(layer).__module__)


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
