# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the ops that other models call and DeepSeek-V4 does not.

They are not in `emulated_xpu/`, every change of which repeats the tests of all steps.
Sums are float32, and results are rounded once. Arguments that no model here has raise.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from triton.runtime import autotuner, interpreter

from proof.e2e.inside import engine_ops  # noqa: F401  (registers what is extended here)
from standins.emulated_xpu.device_api import Grant
from standins.emulated_xpu.ops import flash_attention
from standins.emulated_xpu.wheel.implementations import IMPLEMENTATIONS, implements

GROUPED_GEMM = "_xpu_C::cutlass_grouped_gemm_interface"
ATTENTION = "_vllm_fa2_C::varlen_fwd"
_of_a_tower = IMPLEMENTATIONS[ATTENTION]
_quantized = IMPLEMENTATIONS[GROUPED_GEMM]
READ = {
    "seqused_k",
    "block_table",
    "is_causal",
    "window_size_left",
    "window_size_right",
}
"""What attention over pages has besides that of a tower."""
DEVICE = Grant(
    "torch.xpu.current_device",
    "the number of the process's device",
    "gated delta nets make a norm there; a torch without XPU raises",
    lambda: "cpu",
)


def varlen_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *rest: Any,
) -> list[torch.Tensor]:
    """Attention over pages, `[blocks, block, heads, dim]`, or over keys in a row: the
    last query sees the last key. Heads of keys may be fewer than those of queries."""
    given = dict(zip(flash_attention.NAMES, rest, strict=False))
    for name in given.keys() - flash_attention.NEEDED - READ:
        value, scale = given[name], name in ("k_scale", "v_scale")
        if scale and value is not None and bool((value == 1).all()):
            continue
        if value != flash_attention.PLAIN.get(name):
            raise NotImplementedError(f"varlen_fwd with {name}={value!r}")
    result = torch.empty_like(q) if out is None else out
    used, table = given["seqused_k"], given["block_table"]
    keys = cu_seqlens_k.tolist() if used is None else []
    for i, (first, last) in enumerate(pairwise(cu_seqlens_q.tolist())):
        if table is None:
            own_k, own_v = (x[keys[i] : keys[i + 1]] for x in (k, v))
        else:
            length = int(used[i])
            own_k, own_v = (x[table[i].long()].flatten(0, 1)[:length] for x in (k, v))
        result[first:last] = attended(q[first:last], own_k, own_v, given)
    return [result, q.new_empty(0, dtype=torch.float32)]


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: dict[str, Any]
) -> torch.Tensor:
    """One sequence's rows, `[queries, heads, dim]`."""
    shared = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared, 1).float() for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * given["softmax_scale"]
    distance = torch.arange(len(k)) - torch.arange(len(q))[:, None] - len(k) + len(q)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    left, right = given["window_size_left"], given["window_size_right"]
    right = 0 if given["is_causal"] else right
    if right >= 0:
        hidden |= distance > right
    if left >= 0:
        hidden |= distance < -left
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(q.dtype).float()
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


def grouped_gemm(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Besides quantized weights: those of the rows' own dtype, `[E, K, N]`."""
    names = ("ptr_A", "ptr_A_scale", "ptr_B", "ptr_B_scale", "ptr_bias", "ptr_D")
    given = dict(zip((*names, "rows_per_expert"), args, strict=False)) | kwargs
    rows, weights, out = given["ptr_A"], given["ptr_B"], given["ptr_D"]
    if weights.dtype != rows.dtype:
        return _quantized(*args, **kwargs)
    if given["ptr_bias"] is not None:
        raise NotImplementedError("experts with a bias on the emulated XPU")
    start = 0
    for expert, count in enumerate(given["rows_per_expert"].tolist()):
        own = rows[start : start + count].float() @ weights[expert].float()
        out[start : start + count] = own.to(out.dtype)
        start += count
    return out


@implements("_C_cache_ops::reshape_and_cache_flash")
def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Write each token's keys and values to its slot, where it has one."""
    if kv_cache_dtype != "auto":
        raise NotImplementedError(f"a cache of {kv_cache_dtype} on the emulated XPU")
    slots = slot_mapping[slot_mapping >= 0]
    rows = (slot_mapping >= 0).nonzero().flatten()
    block, place = slots // key_cache.shape[1], slots % key_cache.shape[1]
    key_cache[block, place] = key[rows]
    value_cache[block, place] = value[rows]


@implements("_C::rotary_embedding")
def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Rotate the first `cos_sin_cache.shape[1]` values of each head, in place."""
    cos, sin = cos_sin_cache[positions.flatten()].float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    turned = cos_sin_cache.shape[1]
    for x in (query, key):
        if x is None:
            continue
        heads = x.view(positions.numel(), -1, head_size)
        part = heads[..., :turned].float()
        pair = part.chunk(2, -1) if is_neox else (part[..., ::2], part[..., 1::2])
        both = pair[0] * cos - pair[1] * sin, pair[1] * cos + pair[0] * sin
        joined = torch.cat(both, -1) if is_neox else torch.stack(both, -1).flatten(-2)
        heads[..., :turned] = joined.to(x.dtype)


@implements("_C::layer_norm")
def layer_norm(
    result: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
) -> None:
    """LayerNorm over the last dimension."""
    own = [None if x is None else x.float() for x in (weight, bias)]
    normed = torch.nn.functional.layer_norm(
        input.float(), input.shape[-1:], *own, epsilon
    )
    result.copy_(normed)


IMPLEMENTATIONS[ATTENTION] = varlen_fwd
IMPLEMENTATIONS[GROUPED_GEMM] = grouped_gemm


@implements("_C::gelu_tanh_and_mul")
def gelu_tanh_and_mul(out: torch.Tensor, input: torch.Tensor) -> None:
    """GELU of the first half by its tanh form, times the second half."""
    gate, up = input.float().chunk(2, -1)
    out.copy_(torch.nn.functional.gelu(gate, approximate="tanh") * up)


@implements("_C::gemma_rms_norm")
def gemma_rms_norm(
    result: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> None:
    """RMSNorm whose weight is one more than it says."""
    x = input.float()
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
    result.copy_(x * scale * (1 + weight.float()))


@implements("_C::fused_add_gemma_rms_norm")
def fused_add_gemma_rms_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> None:
    """The same of the sum, which stays in `residual`."""
    residual += input
    gemma_rms_norm(input, residual, weight, epsilon)


@implements("_moe_C::topk_softmax")
def topk_softmax(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    token_expert_indices: torch.Tensor,
    gating_output: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor | None = None,
    is_padding: torch.Tensor | None = None,
) -> None:
    """The experts of the largest probabilities, and these."""
    if bias is not None:
        raise NotImplementedError("topk_softmax with a bias on the emulated XPU")
    chosen = gating_output.float().softmax(-1).topk(topk_ids.shape[1])
    weights = chosen.values
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    topk_weights.copy_(weights)
    topk_ids.copy_(chosen.indices)
    rows = torch.arange(topk_ids.numel(), dtype=token_expert_indices.dtype)
    token_expert_indices.copy_(rows.view(topk_ids.shape[1], -1).T)


@implements("_xpu_C::bgmv_shrink")
def bgmv_shrink(
    outputs: torch.Tensor,
    inputs: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
) -> None:
    """Each row by the first factor of its adapter, where it has one."""
    for row, own in with_adapters(inputs, weights, indices):
        outputs[row, : len(own)] = own * scale


@implements("_xpu_C::bgmv_expand")
def bgmv_expand(
    outputs: torch.Tensor,
    inputs: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    add_to_output: bool,
) -> None:
    """Each row by the second factor of its adapter, where it has one."""
    size = weights.shape[-2]
    bgmv_expand_slice(outputs, inputs, weights, indices, 0, size, add_to_output)


@implements("_xpu_C::bgmv_expand_slice")
def bgmv_expand_slice(
    outputs: torch.Tensor,
    inputs: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    slice_offset: int,
    slice_size: int,
    add_to_output: bool,
) -> None:
    """The same into some columns."""
    for row, own in with_adapters(inputs, weights, indices):
        part = outputs[row, slice_offset : slice_offset + slice_size]
        part.copy_(part.float() + own if add_to_output else own)


def with_adapters(
    inputs: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor]]:
    """Rows whose adapter is not -1, by its weights, `[adapters, 1, out, in]`."""
    for row, adapter in enumerate(indices.tolist()[: len(inputs)]):
        if adapter >= 0:
            weight = weights[adapter].view(weights.shape[-2:]).float()
            yield row, weight @ inputs[row].float()


def provide() -> None:
    """Before the first launch: a grid's function may replace tensors of its launch,
    which the interpreter then takes as they are; and the device has a number."""
    launch = interpreter.GridExecutor.__call__

    def launch_on_grid(self: Any, *args: Any, **kwargs: Any) -> Any:
        if callable(grid := self.grid):

            def converted(given: dict[str, Any]) -> Any:
                size = grid(given)
                for name, value in given.items():
                    if isinstance(value, torch.Tensor):
                        given[name] = interpreter._implicit_cvt(value)
                return size

            self.grid = converted
        return launch(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = launch_on_grid
    # The first of a kernel's configurations: no launch is timed.
    autotuner.Autotuner.do_bench = lambda self, call, quantiles: [0.0, 0.0, 0.0]
    DEVICE.provide()
