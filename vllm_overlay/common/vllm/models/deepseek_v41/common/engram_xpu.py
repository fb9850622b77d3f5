# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Engram on XPU: what is refused, whether the tables fit, where their rows lie in host
memory, and a gather by the CPU."""

from typing import TYPE_CHECKING

import torch
from torch import nn

import vllm.envs as envs
from vllm.config import CUDAGraphMode, ParallelConfig, VllmConfig
from vllm.distributed import get_engram_dp_size, get_pp_group
from vllm.distributed.utils import get_pp_indices
from vllm.logger import init_logger
from vllm.utils.host_memory import BOOT_ID, free_host_memory
from vllm.utils.math_utils import cdiv, next_power_of_2
from vllm.utils.mem_constants import GiB_bytes
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

if TYPE_CHECKING:
    from vllm.models.deepseek_v41.common.engram import EngramLayout

logger = init_logger(__name__)

QUANT_BLOCK = 32
PIECE_BYTES = 1 << 30
"""Of a pinned allocation, at most. Torch takes powers of two, so that a table in one
would take up to twice its size; and XPU buffers above 16 GiB were reported to crash
when they are read (LMCache/LMCache#4129)."""
PIECE_STEP = 4096
"""Rows of a piece are a multiple: the kernel is compiled for their number."""
_ONE, _SCALE_OF_ONE = 0x38, 127
"""The codes of one in E4M3 and UE8M0."""


def check_engram(vllm_config: VllmConfig, layout: "EngramLayout", layer: int) -> None:
    """Print the memory of the tables and of this host and device before this stage's
    first table is allocated; later ones change nothing.

    Args:
        vllm_config: of the engine.
        layout: of the tables.
        layer: index of a table's layer in `layout.layer_ids`.

    Raises:
        ValueError: a setting has no path on XPU, or the tables do not fit.

    """
    rows, needed = layout.num_embeddings[layer], sum(map(sum, layout.primes[layer]))
    if rows < needed:
        raise ValueError(
            f"engram_num_embeddings[{layer}] is {rows} in config.json, but the columns "
            f"of Engram's table of layer {layout.layer_ids[layer]} have {needed} rows: "
            "take config.json and weights from one checkpoint"
        )
    tables = _tables_of_stages(vllm_config, layout)
    stage = get_pp_group().rank_in_group
    if layer != tables[stage][0]:
        return
    engram = vllm_config.engram_config
    assert engram is not None
    parallel = vllm_config.parallel_config
    if not vllm_config.use_v2_model_runner:
        raise ValueError(
            "DeepSeek-V4.1's Engram needs the V2 model runner on XPU, which passes the "
            "tokens before a chunk: unset VLLM_USE_V2_MODEL_RUNNER"
        )
    if not engram.cpu_offload and parallel.data_parallel_size > 1:
        raise ValueError(
            "Engram tables in device memory (cpu_offload=false) are read from peers "
            "by data-parallel ranks, which XPU cannot do: leave cpu_offload true"
        )
    if (
        envs.VLLM_XPU_ENGRAM_CPU_GATHER
        and vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE
    ):
        raise ValueError(
            "VLLM_XPU_ENGRAM_CPU_GATHER=1 waits for the CPU in every step, which a "
            "graph cannot record: add --enforce-eager"
        )
    shards = parallel.tensor_parallel_size * get_engram_dp_size()
    heads = cdiv(layout.n_hash_cols, shards)
    pinned = engram.cpu_offload and not envs.VLLM_XPU_ENGRAM_CPU_GATHER

    def size(table: int) -> int:
        """Bytes of the largest of a table's shards."""
        columns = [size for order in layout.primes[table] for size in order]
        rows = max(sum(columns[n : n + heads]) for n in range(0, len(columns), heads))
        if pinned:
            return sum(map(next_power_of_2, piece_sizes(rows, layout.head_dim)))
        return rows * (layout.head_dim + layout.head_dim // QUANT_BLOCK)

    each = [sum(map(size, found)) for found in tables]
    ranks = {
        rank: _stage_of(rank, parallel)
        for rank in range(torch.distributed.get_world_size())
        if tables[_stage_of(rank, parallel)]
    }
    host_free = free_host_memory()
    device_free = torch.accelerator.get_memory_info()[0]
    hosts = _hosts_of(list(ranks))
    if engram.cpu_offload:
        host = hosts[torch.distributed.get_rank()]
        local = [rank for rank in ranks if hosts[rank] == host]
        place = f"host memory for {len(local)} ranks"
        needed, free = sum(each[ranks[rank]] for rank in local), host_free
        instead = "add memory, or spread the ranks over more hosts"
    else:
        place = "device memory for each rank"
        needed, free = each[stage], device_free
        instead = "leave cpu_offload true, or raise --tensor-parallel-size"
    logger.info(
        "Engram tables: %.2f GiB of %s. Free: %.2f GiB of this host, %.2f GiB of "
        "this device.",
        needed / GiB_bytes,
        place,
        host_free / GiB_bytes,
        device_free / GiB_bytes,
    )
    if needed > free:
        raise ValueError(
            f"Engram tables need {needed / GiB_bytes:.2f} GiB of {place}, of which "
            f"{free / GiB_bytes:.2f} GiB are free: {(needed - free) / GiB_bytes:.2f} "
            f"GiB are missing; {instead}"
        )


def piece_sizes(rows: int, dim: int) -> list[int]:
    """Bytes of each pinned piece of a table of `rows` rows of `dim` values."""
    each, scales = piece_rows(rows, dim), dim // QUANT_BLOCK
    return [
        each * dim + min(each, rows - first) * scales for first in range(0, rows, each)
    ]


def piece_rows(rows: int, dim: int) -> int:
    """Rows of each piece but the last, which has the rest."""
    pieces = cdiv(rows * (dim + dim // QUANT_BLOCK), PIECE_BYTES)
    return cdiv(cdiv(rows, pieces), PIECE_STEP) * PIECE_STEP


class PinnedRows:
    """A table in pieces of pinned host memory, each of values and, behind the place of
    its last row, scales.

    Args:
        rows: of the table.
        dim: FP8 values of a row; it has a scale, a byte, for each 32.

    """

    def __init__(self, rows: int, dim: int) -> None:
        self.count, self.rows, self.dim = rows, piece_rows(rows, dim), dim
        self.pieces = [
            # Model initialization may be inside a device context.
            torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            for size in piece_sizes(rows, dim)
        ]
        self._pointers: torch.Tensor | None = None

    def load(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        """Load this rank's rows of values, or of scales in UE8M0.

        Args:
            param: of no rows; `engram_vocab_start` is the table's first.
            loaded_weight: `[rows of all ranks, dim or dim // 32]`, of 8 bits.

        """
        width = param.shape[1]
        shard = loaded_weight.narrow(0, param.engram_vocab_start, self.count)
        assert shard.shape[1:] == (width,) and shard.itemsize == 1
        for part, held in zip(
            shard.view(torch.uint8).split(self.rows), self.parts(width)
        ):
            held[: len(part)].copy_(part)

    def fill(self) -> None:
        """Make every row ones with a scale of one, as dummy weights are."""
        for piece in self.pieces:
            piece[: self.rows * self.dim] = _ONE
            piece[self.rows * self.dim :] = _SCALE_OF_ONE

    def parts(self, width: int) -> list[torch.Tensor]:
        """Each piece's values, or scales, by the width of a row, `[rows, width]`."""
        space = self.rows * self.dim
        return [
            (piece[:space] if width == self.dim else piece[space:]).view(-1, width)
            for piece in self.pieces
        ]

    def pointers(self, device: torch.device) -> torch.Tensor:
        """Where the device reads each piece, `[pieces]`, int64."""
        if self._pointers is None:
            self._views = list(map(get_accelerator_view_from_cpu_tensor, self.pieces))
            addresses = [view.data_ptr() for view in self._views]
            self._pointers = torch.tensor(addresses, dtype=torch.int64, device=device)
        return self._pointers


def _tables_of_stages(
    vllm_config: VllmConfig, layout: "EngramLayout"
) -> list[list[int]]:
    """The indices of each pipeline stage's tables in `layout.layer_ids`."""
    count = vllm_config.model_config.hf_text_config.num_hidden_layers
    stages = vllm_config.parallel_config.pipeline_parallel_size
    spans = [range(*get_pp_indices(count, stage, stages)) for stage in range(stages)]
    return [
        [i for i, layer in enumerate(layout.layer_ids) if layer in span]
        for span in spans
    ]


def _stage_of(rank: int, parallel: ParallelConfig) -> int:
    """The pipeline stage of a rank of all."""
    each = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
    return rank // each % parallel.pipeline_parallel_size


def _hosts_of(ranks: list[int]) -> dict[int, str]:
    """The host of each of `ranks`; the executor alone decides where they run.

    Returns when all of them have seen how much is free: what others allocate must not
    count as memory that is missing. Stages without tables do not come here.
    """
    group = torch.distributed.new_group(
        ranks, backend="gloo", use_local_synchronization=True
    )
    hosts = [""] * len(ranks)
    torch.distributed.all_gather_object(hosts, BOOT_ID.read_text(), group=group)
    torch.distributed.destroy_process_group(group)
    return dict(zip(ranks, hosts))


def gather_rows(
    weight: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copy rows of a table in host memory to the device of `rows`.

    Args:
        weight: Table of shape `[num_embeddings, dim]`, FP8, on the CPU.
        scales: Its scales of shape `[num_embeddings, dim // 32]`, uint8, on the CPU.
        rows: Rows to copy, `[n]`; those that are not in the table are left out.

    Returns:
        (weight, scales, ids, places) on the device: `n` rows each, the numbers of the
        copied ones, -1 for those left out, and all numbers.

    """
    wanted = rows.cpu()
    owned = (wanted >= 0) & (wanted < weight.shape[0])
    wanted = wanted.where(owned, 0)
    places = torch.arange(wanted.numel(), dtype=torch.int32, device="cpu")
    # Bytes: not every operator takes FP8.
    values = weight.view(torch.uint8).index_select(0, wanted)
    copied = scales.index_select(0, wanted)
    ids = places.where(owned, -1)
    device = rows.device
    return (
        values.to(device).view(weight.dtype),
        copied.to(device),
        ids.to(device),
        places.to(device),
    )
