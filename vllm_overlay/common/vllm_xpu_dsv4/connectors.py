# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Connectors of KV caches: which were compared with DeepSeek V4, and why not others."""

from typing import TYPE_CHECKING, Any

from vllm_xpu_dsv4.releases import OFFLOADS, SERVES_NIXL

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NIXL = ("NixlConnector", "NixlPullConnector")
"""Two names of one."""
NIXL_RANKS = {None: (1, 2, 4, 8), "mtp": (1, 2), "dspark": (1, 2)}
"""By drafts, the tensor-parallel sizes of a side whose bytes were compared."""
HOST = ("OffloadingConnector",)
CONNECTORS = (*(HOST if OFFLOADS else ()), *(NIXL if SERVES_NIXL else ()))
"""As `--kv-transfer-config` names them, whose bytes were compared."""
INSTEAD = "Use OffloadingConnector." if OFFLOADS else "Drop --kv-transfer-config."
NIXL_REFUSED = {
    name: (
        "pages that it brings lack the last token's window, and in host memory mix "
        "those of several caches. Read and answer prompts in one server."
    )
    for name in (*NIXL, "NixlPushConnector")
}
NIXL_SERVED = {
    "NixlPushConnector": (
        "it writes pages where NixlConnector reads them, and nobody compared those. "
        "Use NixlConnector."
    ),
}
HOST_REFUSED = {
    "OffloadingConnector": f"the release copies pages on CUDA and ROCm alone. {INSTEAD}"
}
NO_CONNECTORS = {
    "SimpleCPUOffloadConnector": (
        f"it pins and copies memory by CUDA's own calls. {INSTEAD}"
    ),
    "HiSparseConnector": f"it copies in CUDA's own streams and events. {INSTEAD}",
    "P2pNcclConnector": (
        "it sends by NCCL, which XPU lacks. Read and answer prompts in one server."
    ),
    "ExampleConnector": (
        "it saves in hooks of attention layers, which the model does not call, and so "
        f"keeps nothing. {INSTEAD}"
    ),
    "DecodeBenchConnector": (
        "it fills pages with one value, and answers mean nothing. Drop it."
    ),
    **({} if OFFLOADS else HOST_REFUSED),
    **(NIXL_SERVED if SERVES_NIXL else NIXL_REFUSED),
}
"""Why they are refused, and what to use instead."""
UNTRIED_CONNECTORS = {
    "LMCacheConnectorV1": "needs the package lmcache, built for XPU",
    "LMCacheMPConnector": "needs the package lmcache, built for XPU, and its server",
    "MooncakeConnector": "needs the package mooncake-transfer-engine",
    "MooncakeStoreConnector": (
        "needs the package mooncake-transfer-engine and Mooncake's store"
    ),
    "FlexKVConnectorV1": "needs the package flexkv",
    "HF3FSKVConnector": "needs the package hf3fs_fuse and a 3FS file system",
    "MoRIIOConnector": "needs the package mori, of ROCm",
    "ExampleHiddenStatesConnector": "saves hidden states, and no pages",
}
"""What each takes to be tried."""


def kv_connector(vllm_config: "VllmConfig") -> str | None:
    """A list of what may be used: a connector that nobody tried can bring other pages
    without an error."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return None
    return not_transferred(
        transfer.kv_connector,
        transfer.kv_connector_module_path,
        transfer.kv_connector_extra_config,
    )


def not_transferred(
    name: str | None, module_path: str | None, extra_config: dict[str, Any]
) -> str | None:
    """Why a connector is refused. MultiConnector is as good as its members."""
    if module_path is not None:
        return (
            f"a connector of one's own ({name} of {module_path}) is not tried with the "
            f"model. {INSTEAD}"
        )
    if name == "MultiConnector":
        for member in extra_config.get("connectors", ()):
            if reason := not_transferred(
                member.get("kv_connector"),
                member.get("kv_connector_module_path"),
                member.get("kv_connector_extra_config", {}),
            ):
                return f"{reason} MultiConnector is refused for its member."
            if member.get("kv_connector") in NIXL:
                return (
                    f"{member['kv_connector']} is not tried with the model as one of "
                    "several. Use it alone."
                )
        return None
    if name in CONNECTORS:
        return None
    if name in NO_CONNECTORS:
        return f"{name} is not supported, {NO_CONNECTORS[name]}"
    needs = UNTRIED_CONNECTORS.get(name or "", "is not one of vLLM's")
    return (
        f"{name} is not tried with the model, and so not served: it {needs}. {INSTEAD}"
    )


def nixl(vllm_config: "VllmConfig") -> str | None:
    """Pages and answers were compared of one server that reads and one that answers,
    of sizes and drafts in `NIXL_RANKS`. What the other has, a start cannot know."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector not in NIXL:
        return None
    name = transfer.kv_connector
    if transfer.kv_connector_extra_config.get("bidirectional_kv_xfer"):
        return (
            f"{name} with bidirectional_kv_xfer is not tried with the model. Drop it "
            "from kv_connector_extra_config."
        )
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return (
            f"{name} takes no caches of several kinds over pipeline stages. Use "
            "--tensor-parallel-size in place of --pipeline-parallel-size."
        )
    replicas = parallel.data_parallel_size
    if replicas > 1:
        return (
            f"{name} is not tried with the model over {replicas} replicas "
            "(--data-parallel-size). Start a server for each."
        )
    speculation = vllm_config.speculative_config
    drafts = speculation.method if speculation is not None else None
    if drafts not in NIXL_RANKS:
        return (
            f"{name} is not tried with the model and drafts of {drafts}. "
            "Use method mtp or dspark in --speculative-config where the checkpoint "
            "has it, or drop the option."
        )
    ranks = parallel.tensor_parallel_size
    if ranks not in NIXL_RANKS[drafts]:
        behind = f" with drafts of {drafts}" if drafts else ""
        sizes = " or ".join(map(str, NIXL_RANKS[drafts]))
        return (
            f"{name} is not tried with the model over {ranks} tensor-parallel ranks"
            f"{behind}. Use --tensor-parallel-size {sizes} on both sides."
        )
    return None
