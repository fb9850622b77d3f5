# SPDX-License-Identifier: Apache-2.0
"""What vLLM's CUDA wheel brings for routed experts on a Hopper GPU.

Marlin, which is compiled; and for MXFP4 alone triton_kernels, which vLLM calls its
Triton back end, and vLLM's own `fused_moe_kernel`, on weights in bf16. The activation
between the products is one small kernel of this file for all. triton_kernels gets its
routing made before, the others route in each call.
"""

import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.xpu_dsv4.moe._experts_formats import MXFP4

from ..files import WHEEL_FOLDER
from ..workload import Competitors
from .experts_layer import LIMIT, Experts, Layer, Sizes, Step

LIBRARY = "vllm/_moe_C_stable_libtorch.abi3.so"
TRITON_KERNELS = "vllm/third_party"
UTILS = "vllm/model_executor/layers/quantization/utils/"
FUSED_MOE = "vllm/model_executor/layers/fused_moe/fused_moe.py"
MARLIN_TYPES = {"mxfp4": "float4_e2m1f", "fp8": "float8_e4m3fn", "int4": "uint4b8"}
GROUP = 32
TILE = 16


@triton.jit
def _swiglu_kernel(
    gate_up_ptr, out_ptr, num_columns, LIMIT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_columns
    gate_up_ptr += row * 2 * num_columns
    gate = tl.load(gate_up_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + num_columns + offs, mask=mask, other=0.0)
    gate = tl.minimum(gate, LIMIT)
    up = tl.clamp(up.to(tl.float32), -LIMIT, LIMIT)
    values = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * num_columns + offs, values.to(tl.bfloat16), mask=mask)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Rows `[n, I]` of gate and up, `[n, 2 * I]`, bf16."""
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, columns, dtype=gate_up.dtype, device=gate_up.device)
    grid = (rows, triton.cdiv(columns, 1024))
    _swiglu_kernel[grid](gate_up, out, columns, LIMIT=LIMIT, BLOCK=1024)
    return out


def align(
    ids: torch.Tensor, experts: int, block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs by expert, in blocks; the expert of each block; how many there are."""
    pairs = ids.numel()
    room = min(pairs * block, pairs + experts * (block - 1))

    def table(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=ids.device)

    made = (table(room), table(triton.cdiv(room, block)), table(1))
    torch.ops._moe_C.moe_align_block_size(ids, experts, block, *made, None)
    return made


def total(rows: torch.Tensor, step: Step) -> torch.Tensor:
    """The sum of each token's rows, `[T * K, H]`."""
    out = torch.empty_like(step.x)
    torch.ops._moe_C.moe_sum(rows.view(*step.ids.shape, -1), out)
    return out


def _marlin_weight(
    orders: tuple[ModuleType, ModuleType], codes: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A checkpoint's weight and scales in Marlin's order; types tell the format."""
    device, is_fp8 = codes.device, codes.dtype == torch.float8_e4m3fn
    bits = 8 if is_fp8 else 4
    perm = orders[0].get_weight_perm(bits).to(device)
    scale_perm = torch.tensor(orders[1].get_scale_perms()[0], device=device)
    places = bits * torch.arange(32 // bits, device=device)
    made, moved = [], []
    for code, scale in zip(codes.view(torch.uint8), scales, strict=True):
        values = code if is_fp8 else torch.stack((code & 15, code >> 4), -1).flatten(-2)
        depth, columns = values.T.shape
        tiles = values.T.reshape(depth // TILE, TILE, columns // TILE, TILE)
        tiles = tiles.transpose(1, 2).reshape(-1, len(perm))[:, perm]
        packed = (tiles.reshape(-1, len(places)).long() << places).sum(-1)
        made.append(packed.to(torch.int32).view(depth // TILE, -1))
        if is_fp8:
            # Marlin's codes lack the difference of the exponents' biases.
            scale = (scale.repeat_interleave(128, 0)[:columns] * 2.0**120).bfloat16()
        scale = scale.T.reshape(-1, len(scale_perm))[:, scale_perm]
        if scale.dtype == torch.uint8:
            scale = scale.reshape(-1, 4)[:, [0, 2, 1, 3]].view(torch.float8_e8m0fnu)
        moved.append(scale.reshape(-1, columns).contiguous())
    return torch.stack(made), torch.stack(moved)


@cache
def marlin(
    sizes: Sizes, layer: Layer, orders: tuple[ModuleType, ModuleType]
) -> Experts:
    """Marlin's products, as vLLM's `fused_marlin_moe` calls them."""
    first = _marlin_weight(orders, layer.w13, layer.w13_scale)
    second = _marlin_weight(orders, layer.w2, layer.w2_scale)
    device = layer.w2.device
    cores = torch.cuda.get_device_properties(device).multi_processor_count
    locks = torch.zeros(4 * cores, dtype=torch.int32, device=device)
    kind = getattr(orders[0].scalar_types, MARLIN_TYPES[sizes.form.name]).id

    def product(
        x: torch.Tensor,
        weight: tuple[torch.Tensor, torch.Tensor],
        step: Step,
        blocks: tuple[torch.Tensor, ...],
        block: int,
        topk: int,
        columns: int,
        weighted: bool,
    ) -> torch.Tensor:
        rows, depth = x.shape
        codes, scales = weight
        out = torch.empty(rows * topk, columns, dtype=x.dtype, device=x.device)
        operands = (x, out, codes, None, scales, None, None, None, locks)
        shape = (block, topk, weighted, kind, rows, columns, depth)
        how = (False, True, False, -1, -1, -1)
        gemm = torch.ops._moe_C.moe_wna16_marlin_gemm
        made: torch.Tensor = gemm(*operands, *blocks, step.weights, *shape, *how)
        return made

    def run(step: Step) -> torch.Tensor:
        tokens, topk = step.ids.shape
        mean = tokens * topk / sizes.experts
        block = next(size for size in (8, 16, 32, 48, 64) if mean / size < 0.9)
        blocks = align(step.ids, sizes.experts, block)
        wide = 2 * sizes.intermediate
        rows = product(step.x, first, step, blocks, block, topk, wide, False)
        rows = swiglu(rows)
        rows = product(rows, second, step, blocks, block, 1, sizes.hidden, True)
        return total(rows, step)

    return run


@cache
def triton_kernels(sizes: Sizes, layer: Layer) -> Experts:
    """triton_kernels' products, in the layouts that vLLM takes on a Hopper GPU."""
    from triton_kernels import matmul_ogs as ogs
    from triton_kernels import routing, tensor
    from triton_kernels.matmul_ogs_details import opt_flags
    from triton_kernels.tensor_details import layout

    opt_flags.update_opt_flags_constraints({"split_k": 1})
    values, value_options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    scales, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(
        mx_axis=1, num_warps=8
    )

    def weight(codes: torch.Tensor, exponents: torch.Tensor) -> tuple[Any, Any]:
        wrapped = tensor.wrap_torch_tensor(codes.transpose(-2, -1), dtype=tensor.FP4)
        scale = tensor.wrap_torch_tensor(exponents.transpose(-2, -1))
        scale = tensor.convert_layout(scale, scales, **scale_options)
        config = ogs.PrecisionConfig(weight_scale=scale, out_dtype=torch.bfloat16)
        return tensor.convert_layout(wrapped, values, **value_options), config

    first, first_config = weight(layer.w13, layer.w13_scale)
    second, second_config = weight(layer.w2, layer.w2_scale)

    @cache
    def route(step: Step) -> tuple[Any, Any, Any]:
        tokens, topk = step.ids.shape
        order = step.ids.flatten().long().argsort(stable=True)
        back = order.argsort(stable=True).int()
        experts = sizes.experts
        counts = torch.bincount(step.ids.flatten(), minlength=experts).int()
        gates = step.weights.flatten()[order]
        data = routing.compute_expt_data_torch(counts, experts, tokens * topk)
        made = routing.RoutingData(gates, counts, experts, topk, data)
        order = order.int()
        gather = routing.GatherIndx(src_indx=order, dst_indx=back)
        return made, gather, routing.ScatterIndx(src_indx=back, dst_indx=order)

    def run(step: Step) -> torch.Tensor:
        data, gather, scatter = route(step)
        product: Callable[..., torch.Tensor] = ogs.matmul_ogs
        rows = product(step.x, first, None, data, gather, precision_config=first_config)
        return product(
            swiglu(rows),
            second,
            None,
            data,
            scatter_indx=scatter,
            precision_config=second_config,
            gammas=data.gate_scal,
        )

    return run


@cache
def fused_moe(sizes: Sizes, layer: Layer, kernels: ModuleType) -> Experts:
    """vLLM's own Triton kernel on weights that were dequantized before."""

    def weight(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
        made = []
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=codes.device)
        grid = torch.cat((grid, -grid))
        for code, exponent in zip(codes, exponents, strict=True):
            values = grid[torch.stack((code & 15, code >> 4), -1).flatten(-2).int()]
            scale = torch.exp2(exponent.float() - 127).repeat_interleave(GROUP, -1)
            made.append((values * scale).bfloat16())
        return torch.stack(made)

    first = weight(layer.w13, layer.w13_scale)
    second = weight(layer.w2, layer.w2_scale)
    block = 16

    def product(
        x: torch.Tensor,
        weight: torch.Tensor,
        step: Step,
        blocks: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        topk: int,
        weighted: bool,
    ) -> torch.Tensor:
        pairs, (columns, depth) = step.ids.numel(), weight.shape[1:]
        out = torch.empty(pairs, columns, dtype=x.dtype, device=x.device)
        room = blocks[0].numel()
        kernels.fused_moe_kernel[(triton.cdiv(room, block) * (columns // 64),)](
            x,
            weight,
            out,
            None,
            None,
            None,
            step.weights,
            *blocks,
            columns,
            depth,
            room,
            pairs,
            *x.stride(),
            weight.stride(0),
            weight.stride(2),
            weight.stride(1),
            *out.stride(),
            *(0,) * 7,
            group_n=0,
            group_k=0,
            naive_block_assignment=False,
            BLOCK_SIZE_M=block,
            BLOCK_SIZE_N=64,
            BLOCK_SIZE_K=128,
            GROUP_SIZE_M=1,
            SPLIT_K=1,
            MUL_ROUTED_WEIGHT=weighted,
            top_k=topk,
            compute_type=tl.bfloat16,
            use_fp8_w8a8=False,
            use_int8_w8a8=False,
            use_int8_w8a16=False,
            per_channel_quant=False,
            HAS_BIAS=False,
            SWAP_AB=False,
            num_warps=4,
            num_stages=4,
        )
        return out

    def run(step: Step) -> torch.Tensor:
        topk = step.ids.shape[1]
        blocks = align(step.ids, sizes.experts, block)
        rows = swiglu(product(step.x, first, step, blocks, topk, False))
        return total(product(rows, second, step, blocks, 1, True), step)

    return run


def implementations(
    sizes: Sizes, layer: Layer, competitors: Competitors
) -> Iterator[tuple[str, Experts, str]]:
    """Name, implementation and note of those that are there."""
    wheel = competitors.folder / WHEEL_FOLDER
    try:
        torch.ops.load_library(str((wheel / LIBRARY).absolute()))
        names = ("marlin_utils_test.py", "marlin_utils.py")
        orders = (
            competitors.load(UTILS + names[0]),
            competitors.load(UTILS + names[1]),
        )
        yield "Marlin", marlin(sizes, layer, orders), ""
        if sizes.form is not MXFP4:
            return
        kernels = competitors.load(FUSED_MOE)
        yield "fused_moe_kernel", fused_moe(sizes, layer, kernels), "weights in bf16"
    except (OSError, ImportError, AttributeError) as error:
        competitors.missing.append(f"Marlin and vLLM's fused_moe_kernel: {error}")
    folder = str((wheel / TRITON_KERNELS).absolute())
    sys.path.insert(0, folder)
    try:
        yield "triton_kernels", triton_kernels(sizes, layer), "routed before"
    except Exception as error:  # whatever another Triton makes of it
        competitors.missing.append(f"triton_kernels: {type(error).__name__}: {error}")
    finally:
        sys.path.remove(folder)
