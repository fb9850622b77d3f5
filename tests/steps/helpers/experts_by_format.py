# SPDX-License-Identifier: Apache-2.0
"""Random routed experts in FP8 and INT4, loaded and computed as vLLM's oracles say."""

from types import SimpleNamespace
from typing import Any

import torch

from . import layout, model_configs

EXPERTS, TOPK, HIDDEN, TOKENS = 4, 2, 128, 7
LIMIT = 1.0
"""About a quarter of the projections are beyond it."""

Weight = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Codes and scales as a checkpoint has them, and what they stand for in float64."""


def _oracle(name: str) -> Any:
    return layout.module(f"{layout.FUSED_MOE}.oracle.{name}")


class Fp8:
    """Square blocks of `size` share a scale."""

    oracle = "fp8"

    def __init__(self, size: int) -> None:
        self.size = size

    def weight(self, rows: int, depth: int) -> Weight:
        codes = torch.randn(EXPERTS, rows, depth).to(torch.float8_e4m3fn)
        blocks = EXPERTS, rows // self.size, depth // self.size
        scale = (0.5 + torch.rand(blocks)) * depth**-0.5
        each = scale.repeat_interleave(self.size, 1).repeat_interleave(self.size, 2)
        return codes, scale, codes.double() * each.double()

    def select(self, config: Any) -> tuple[Any, Any]:
        """The backend of `config`, and its class."""
        keys = layout.module(f"{layout.LAYER_QUANTIZATION}.utils.quant_utils")
        shape = keys.GroupShape(self.size, self.size)
        key = keys.create_fp8_quant_key(static=True, group_shape=shape)
        with model_configs.current(model_configs.vllm_config()):
            found: tuple[Any, Any] = _oracle("fp8").select_fp8_moe_backend(
                config, key, keys.kFp8Dynamic128Sym
            )
        return found

    def load(
        self, backend: Any, weights: list[torch.Tensor], limit: float | None
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Both weights as `backend` takes them, and the quantization's config."""
        layer = SimpleNamespace(weight_block_size=[128, 128])
        w13, w13_scale, w2, w2_scale = weights
        w13, w2, w13_scale, w2_scale = _oracle("fp8").convert_to_fp8_moe_kernel_format(
            backend, layer, w13, w2, w13_scale, w2_scale, None, None
        )
        config = _oracle("fp8").make_fp8_moe_quant_config(
            backend,
            w1_scale=w13_scale,
            w2_scale=w2_scale,
            a1_scale=None,
            a2_scale=None,
            block_shape=[self.size, self.size],
            swiglu_limit=limit,
        )
        return w13, w2, config

    def make(self, quantization: Any, config: Any, kernel: Any, backend: Any) -> Any:
        """What the layer calls."""
        oracle = _oracle("fp8")
        return oracle.make_fp8_moe_kernel(quantization, config, kernel, backend)


class Int4:
    """Groups of `size` share a scale; codes have their zero at 8."""

    oracle = "int_wna16"

    def __init__(self, size: int, *, symmetric: bool = True) -> None:
        self.size, self.symmetric = size, symmetric

    def weight(self, rows: int, depth: int) -> Weight:
        codes = torch.randint(16, (EXPERTS, rows, depth))
        words = (codes.unflatten(2, (-1, 8)) << torch.arange(0, 32, 4)).sum(-1)
        shape = EXPERTS, rows, depth // self.size
        scale = ((0.5 + torch.rand(shape)) * depth**-0.5 / 4).bfloat16()
        values = (codes - 8).double() * scale.double().repeat_interleave(self.size, 2)
        return words.to(torch.int32), scale, values

    def _described(self) -> Any:
        known = layout.module(f"{layout.LAYER_QUANTIZATION}.auto_gptq").AutoGPTQConfig
        options = {"bits": 4, "group_size": self.size, "sym": True}
        return known.from_config(options | {"desc_act": False})

    def select(self, config: Any) -> tuple[Any, Any]:
        """The backend of `config`, and its class."""
        keys = layout.module(f"{layout.LAYER_QUANTIZATION}.utils.quant_utils")
        found: tuple[Any, Any] = _oracle("int_wna16").select_wna16_moe_backend(
            config,
            keys.kInt4Static,
            quant_config=self._described(),
            may_have_zp=not self.symmetric,
            may_have_bias=False,
        )
        return found

    def load(
        self, backend: Any, weights: list[torch.Tensor], limit: float | None
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Both weights as `backend` takes them, and the quantization's config, which
        has no limit."""
        w13, w13_scale, w2, w2_scale = weights
        w13, w2, w13_scale, w2_scale, *_ = _oracle(
            "int_wna16"
        ).convert_to_wna16_moe_kernel_format(
            backend,
            SimpleNamespace(),
            self._described(),
            None,
            w13,
            w2,
            w13_scale,
            w2_scale,
        )
        made = layout.module(f"{layout.FUSED_MOE}.config").gptq_marlin_moe_quant_config
        return w13, w2, made(w13_scale, w2_scale, weight_bits=4, group_size=self.size)

    def make(self, quantization: Any, config: Any, kernel: Any, backend: Any) -> Any:
        """What the layer calls."""
        oracle = _oracle("int_wna16")
        return oracle.make_wna16_moe_kernel(quantization, config, kernel, backend)


class Layer:
    """A layer's experts with `columns` columns of the gate, and a step's tokens."""

    def __init__(self, form: Any, columns: int) -> None:
        torch.manual_seed(0)
        self.form = form
        self.weights: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for rows, depth in ((2 * columns, HIDDEN), (HIDDEN, columns)):
            *stored, values = form.weight(rows, depth)
            self.weights += stored
            self.values.append(values)
        self.x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
        self.topk_weights, ids = torch.rand(TOKENS, EXPERTS).topk(TOPK)
        self.topk_ids = ids.to(torch.int32)

    def reference(self, ids: torch.Tensor) -> torch.Tensor:
        """In float64; an expert of -1 adds nothing."""
        gate_up = torch.einsum("th,enh->ten", self.x.double(), self.values[0])
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        each = torch.nn.functional.silu(gate) * up
        rows = torch.einsum("ten,eon->teo", each, self.values[1])
        here = (ids >= 0).double() * self.topk_weights
        index = ids.clamp(min=0).long()[..., None].expand(-1, -1, HIDDEN)
        return (rows.gather(1, index) * here[..., None]).sum(1)

    def made(self, config: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """The experts that the oracle selects, with their weights as it loads them:
        while BF16 is the type of new tensors."""
        backend, kernel = self.form.select(config)
        weights = [tensor.clone().to(layout.device()) for tensor in self.weights]
        utilities = layout.module("vllm.utils.torch_utils")
        with utilities.set_default_torch_dtype(torch.bfloat16):
            w13, w2, quantization = self.form.load(backend, weights, LIMIT)
            made = self.form.make(quantization, config, kernel, backend)
        return made.fused_experts, w13, w2

    def run(
        self, config: Any, ids: torch.Tensor, expert_map: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What these experts give."""
        made, w13, w2 = self.made(config)
        assert made.expects_unquantized_inputs
        device = layout.device()
        sizes = (TOKENS, self.weights[0].shape[1], HIDDEN, TOPK, EXPERTS, EXPERTS)
        shapes = made.workspace_shapes(*sizes, None, config.activation)
        options = {"dtype": torch.bfloat16, "device": device}
        output = torch.full((TOKENS, HIDDEN), torch.nan, **options)
        made.apply(
            output=output,
            hidden_states=self.x.to(device),
            w1=w13,
            w2=w2,
            topk_weights=self.topk_weights.to(device),
            topk_ids=ids.to(device),
            activation=config.activation,
            global_num_experts=EXPERTS,
            expert_map=None if expert_map is None else expert_map.to(device),
            a1q_scale=None,
            a2_scale=None,
            workspace13=torch.empty(shapes[0], **options),
            workspace2=torch.empty(shapes[1], **options),
            expert_tokens_meta=None,
            apply_router_weight_on_input=False,
        )
        return output.cpu()
