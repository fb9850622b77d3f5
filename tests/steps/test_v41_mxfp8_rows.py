# SPDX-License-Identifier: Apache-2.0
"""V4.1's attention quantizes inputs of its MXFP8 layers in as few launches as it can,
and layers that read one choice look up once where its entries lie."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import block_fp8, kernel_trace, layer_parts, layout, output_projection, v41
from helpers.compilations import check, compiled

CHOICES = {
    "num_hidden_layers": 6,
    "compress_ratios": [0, 2, 2, 1, 1, 1],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 5],
    "candidate_source_layer_id": 3,
}
"""Layers 2 and 4 read what the one before them chose."""
SPARSE = "vllm.models.deepseek_v4.xpu.xpu_sparse"
SPARSE_V41 = "vllm.models.deepseek_v41.xpu.xpu_sparse"
MXFP8 = "vllm.models.deepseek_v41.xpu.mxfp8"
OPERATIONS = "vllm.models.common.ops"


def fill(linear: Any) -> None:
    """Random codes and scales, as a checkpoint's are loaded."""
    rows, columns = linear.weight.shape
    codes = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    exponents = torch.randint(-6, -2, (rows // 32, columns // 32))
    scales = torch.exp2(exponents.float()).to(torch.float8_e8m0fnu)
    whole = scales.view(torch.uint8).repeat_interleave(32, 0)
    linear.weight.data.copy_(codes)
    target = linear.weight_scale.data
    target.copy_(whole.view(target.dtype))
    linear.quant_method.process_weights_after_loading(linear)


@pytest.fixture(scope="module")
def attn(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Attention of a layer with an indexer."""
    torch.manual_seed(1)
    config = v41.configured(tmp_path_factory.mktemp("v41"))
    made = v41.built(config).language_model.model.layers[1].attn
    for linear in (made.fused_wqa_wkv, made.wq_b, made.wo_a, made.wo_b):
        fill(linear)
    fill(made.indexer.wq_b)
    for norm in (made.q_norm, made.kv_norm):
        norm.weight.data.copy_(1 + torch.randn(norm.weight.shape) / 8)
    made.process_weights_after_loading(torch.bfloat16)
    return made


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16().to(layout.device())


def test_the_input(attn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are those of the pin's op, of which a conversion goes."""
    x = drawn(5, attn.hidden_size)
    with kernel_trace.traced(monkeypatch) as trace:
        got = attn._fused_wqa_wkv_gemm(x)
    assert trace.launches == ["_quantize_kernel"], "rows take two launches"
    assert torch.equal(got, attn.fused_wqa_wkv(x)[0])


def test_the_query(attn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm writes what both products of the query read."""
    rows = drawn(5, attn.q_lora_rank + attn.head_dim)
    with kernel_trace.traced(monkeypatch) as trace:
        qr, scale, kv = attn._split_qkv_and_norm(rows)
    assert not isinstance(qr, torch.Tensor), "rows are quantized behind the norm"
    assert trace.launches == ["_q_kv_norm_kernel"] and scale is None
    q, k = rows.split([attn.q_lora_rank, attn.head_dim], dim=-1)
    weights = attn.q_norm.weight.data, attn.kv_norm.weight.data
    norms = layout.module(OPERATIONS).fused_q_kv_rmsnorm
    plain, plain_kv = norms(q, k, *weights, attn.eps)
    torch.testing.assert_close(kv, plain_kv, atol=0, rtol=2**-7)
    assert qr.orig_dtype == torch.bfloat16
    for product in (attn._wq_b_proj, attn.indexer._wq_b_proj):
        got, wanted = product(qr).double(), product(plain).double()
        assert got.shape == wanted.shape
        assert (got - wanted).norm() < 0.01 * wanted.norm()


def test_the_output(attn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the groups' product are read where they lie."""
    positions = torch.arange(5, device=layout.device())
    output = drawn(5, attn.n_local_heads, attn.head_dim)
    with kernel_trace.traced(monkeypatch) as trace:
        got = attn._o_proj(output, positions)
    copies = [name for name in trace.ops if "clone" in name or "copy" in name]
    assert not copies, f"rows are copied and take two launches: {copies}"
    assert trace.launches[-1] == "_quantize_kernel"
    monkeypatch.setattr(attn, "quantizes_rows", False)
    assert torch.equal(got, attn._o_proj(output, positions))


@pytest.mark.parametrize(
    "sizes",
    [{}, {"hidden_size": 512}, {"o_lora_rank": 256}],
    ids=["8 and 2 x 4", "16 and 2 x 4", "8 and 2 x 8"],
)
def test_the_warm_up_compiles_them(
    sizes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton compiles a number that 16 divides apart: groups of the input, and of the
    output's two matrices."""
    config = v41.configured(tmp_path, sizes, enforce_eager=False)
    warmup = layout.module("vllm.model_executor.warmup.jit_warmup")
    registry = warmup.JitWarmupRegistry(config)
    with registry.activate():
        made = v41.built(config).language_model.model.layers[1].attn
    kernel = layout.module(MXFP8).XPU_MXFP8_KERNEL
    assert kernel in registry._registrations
    with compiled(monkeypatch, launch=False) as before:
        for key in kernel.get_warmup_keys(made):
            kernel.compile(key)
    monkeypatch.setattr(made.fused_wqa_wkv, "forward", lambda rows: (rows, None))
    monkeypatch.setattr(made.wo_b, "forward", lambda rows: rows)
    with compiled(monkeypatch, launch=False) as needed:
        for tokens in (1, 3, 16):
            made._fused_wqa_wkv_gemm(drawn(tokens, made.hidden_size))
            made._split_qkv_and_norm(drawn(tokens, made.q_lora_rank + made.head_dim))
            product = drawn(made.n_local_groups, tokens, made.o_lora_rank)
            made._project_groups(product.transpose(0, 1))
    check(needed, before)


@pytest.mark.parametrize(
    "other", ["fused_wqa_wkv", "attn.wq_b", "wo_b", "indexer.wq_b"]
)
def test_layers_of_another_kind_get_plain_rows(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any of the four: norm and rows are those of CUDA's layer."""
    module = layout.module(SPARSE_V41)
    takes = getattr(module, "takes_mxfp8", None)
    assert takes is not None, "rows take two launches"
    monkeypatch.setattr(
        module, "takes_mxfp8", lambda x: takes(x) and not x.prefix.endswith(other)
    )
    made = v41.built(v41.configured(tmp_path)).language_model.model.layers
    assert not made[1].attn.quantizes_rows
    assert made[0].attn.quantizes_rows == ("indexer" in other)
    given: list[torch.Tensor] = []
    attn = made[1].attn

    def projected(x: torch.Tensor) -> tuple[None, torch.Tensor]:
        given.append(x)
        return None, x

    monkeypatch.setattr(attn.fused_wqa_wkv, "forward", projected)
    monkeypatch.setattr(attn.wo_b, "forward", given.append)
    x = drawn(3, attn.hidden_size)
    attn._fused_wqa_wkv_gemm(x)
    qr, _, _ = attn._split_qkv_and_norm(drawn(3, attn.q_lora_rank + attn.head_dim))
    attn._project_groups(drawn(3, attn.n_local_groups, attn.o_lora_rank))
    assert given[0] is x and qr.dtype == torch.bfloat16
    assert given[1].shape == (3, attn.n_local_groups * attn.o_lora_rank)


@pytest.fixture
def choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Attention layers, what they ask for and what decode reads."""
    model = v41.built(v41.configured(tmp_path, CHOICES)).language_model.model
    found = SimpleNamespace(asked=[], read=[], context=None)
    module = layout.module(SPARSE)

    def looked_up(
        chosen: torch.Tensor, *rest: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found.asked.append(rest)
        return chosen + len(found.asked), chosen[:, 0]

    def decode(**given: Any) -> None:
        found.read.append((given["topk_indices"], given["topk_lens"]))

    monkeypatch.setattr(module, "compute_global_topk_indices_and_lens", looked_up)
    monkeypatch.setattr(module, "xpu_sparse_decode_fp8", decode)
    context = SimpleNamespace(additional_kwargs={})
    for name in (SPARSE, SPARSE_V41):
        monkeypatch.setattr(
            layout.module(name), "get_forward_context", lambda: context, raising=False
        )
    window = SimpleNamespace(
        num_decodes=2,
        num_decode_tokens=3,
        is_valid_token=torch.ones(4, dtype=torch.bool),
        token_to_req_indices="requests",
        decode_swa_indices="window",
        decode_swa_lens="lengths",
    )
    pages = SimpleNamespace(block_size=128, block_table=torch.zeros(4, 2))

    def run(layer: int) -> None:
        attn = model.layers[layer].attn
        attn.topk_indices_buffer = torch.arange(4 * 16).view(4, 16)
        monkeypatch.setattr(attn, "_decode_workspace", lambda: None)
        attn._forward_decode("q", None, window, pages, False, "output")

    found.run, found.context = run, context
    return found


def test_a_choice_is_looked_up_once(choices: Any) -> None:
    for layer in (1, 2):
        choices.run(layer)
    assert len(choices.asked) == 1, "entries are looked up again"
    requests, table, block, valid = choices.asked[0]
    assert (requests, table.shape[0], block, len(valid)) == ("requests", 2, 64, 3)
    (indices, lens), again = choices.read
    assert indices is again[0] and lens is again[1]
    assert indices.shape == (3, 1, 16) and lens.shape == (3,)


def test_the_next_source_and_the_next_step_look_anew(choices: Any) -> None:
    for layer in (1, 2, 3, 4, 5):
        choices.run(layer)
    assert len(choices.asked) == 3, (
        f"{len(choices.asked)} choices of three are looked up"
    )
    blocks = [block for _, _, block, _ in choices.asked]
    assert blocks == [64, 128, 128]
    # A step that a graph replays, or a second pass over a part of the batch.
    choices.run(3)
    choices.context.additional_kwargs = {}
    choices.run(4)
    assert len(choices.asked) == 5
    first = [indices[0, 0, 0].item() for indices, _ in choices.read]
    assert first == [1, 1, 2, 2, 3, 4, 5]


@pytest.mark.unchanged
def test_a_product_takes_plain_rows(attn: Any) -> None:
    """As other models give them."""
    x = drawn(3, attn.hidden_size)
    rows, scales = layout.module(
        "vllm.model_executor.layers.quantization.utils.mxfp8_utils"
    ).xpu_mxfp8_quantize(x)
    exact = rows.double() * scales.double().repeat_interleave(32, 1)
    weight = attn.fused_wqa_wkv.weight.double()
    scale = attn.fused_wqa_wkv.weight_scale.double().repeat_interleave(32, 1)
    wanted = exact @ (weight * scale).T
    got = attn.fused_wqa_wkv(x)[0].double()
    assert (got - wanted).norm() < 0.004 * wanted.norm()


@pytest.mark.unchanged
def test_the_product_of_v4_in_fp8() -> None:
    """wo_b takes its rows as before, a row for each token."""
    layer = output_projection.attention("auto")
    weight = block_fp8.load(layer.wo_a)
    layer_parts.finish_loading(layer)
    layer.wo_b = torch.nn.Identity()
    operand = layer._alloc_attn_out(3, drawn(3, layer.hidden_size))
    operand.data.copy_(torch.randn(operand.data.shape))
    operand.scale.copy_(torch.rand(operand.scale.shape))
    got = layer._o_proj(operand, torch.arange(3, device=layout.device()))
    rows = operand.data.double() * operand.scale.double().repeat_interleave(128, -1)
    groups = weight.view(len(rows), layer.o_lora_rank, -1)
    wanted = torch.einsum("gtd,grd->tgr", rows.cpu(), groups).flatten(1)
    assert (got.cpu().double() - wanted).norm() < 0.004 * wanted.norm()
