# SPDX-License-Identifier: Apache-2.0
"""Loads single tensors of a checkpoint into a small model, or into its draft."""

import functools
from typing import Any

import torch

from . import layout, model_configs, published, quantizations

HIDDEN, INTER, Q_LORA = 256, 128, 128
BLOCK, GROUP = 128, 32
E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
SHAPES = {
    "attn.wq_a": (Q_LORA, HIDDEN),
    "attn.wq_b": (layout.HEADS * 512, Q_LORA),
    "ffn.shared_experts.w2": (HIDDEN, INTER),
    "ffn.experts.1.w1": (INTER, HIDDEN),
    "ffn.experts.1.w2": (HIDDEN, INTER),
}
LINEARS = [name for name in SHAPES if ".experts." not in name]
EXPERTS = [name for name in SHAPES if ".experts." in name]
# The parameter that has the scales; those of w1 and wq_a are its first rows.
HELD = {
    "attn.wq_a": ".attn.fused_wqa_wkv.",
    "attn.wq_b": ".attn.wq_b.",
    "ffn.shared_experts.w2": ".down_proj.",
    "ffn.experts.1.w1": ".w13_",
    "ffn.experts.1.w2": ".w2_",
}
# Of each owner: where the checkpoint has a layer, and where the model has it.
LAYERS = {
    "model": ("layers.1", "model.layers.1"),
    "mtp": ("mtp.0", "model.layers.3.mtp_block"),
}
if layout.WITH_XPU_FOLDER:
    LAYERS["dspark"] = ("mtp.0", "model.layers.0")
DSPARK = {"dspark_target_layer_ids": [1], "dspark_markov_rank": 8, "n_mtp_layers": 1}

Tensors = dict[str, torch.Tensor]


class Loader:
    """A model of three small layers, or its draft model, and its own loader."""

    def __init__(self, owner: str, expert_dtype: str, kind: str = "") -> None:
        self._owner = owner
        self._config = model_configs.vllm_config(speculative_tokens=1, quantized=True)
        self.hf_config = self._config.model_config.hf_config
        if kind:
            described = quantizations.KINDS[kind][0]
            self.hf_config.quantization_config = described
            self._config.quant_config = quantizations.config_of(described)
        self.hf_config.expert_dtype = expert_dtype
        self.hf_config.num_hash_layers = 1
        draft = self._config.speculative_config.draft_model_config
        draft.hf_config = self.hf_config
        if owner == "dspark":
            self.hf_config.update(DSPARK)
        kinds = {
            "model": (layout.MODEL, "DeepseekV4ForCausalLM"),
            "mtp": (layout.MTP, "DeepSeekV4MTP"),
            "dspark": (getattr(layout, "DSPARK", ""), "DSparkDeepseekV4ForCausalLM"),
        }
        module, kind = kinds[owner]
        utilities = layout.module("vllm.utils.torch_utils")
        with (
            model_configs.current(self._config),
            layout.worker(),
            utilities.set_default_torch_dtype(torch.bfloat16),
        ):
            self._model = getattr(layout.module(module), kind)(
                vllm_config=self._config, prefix=""
            )

    def load(self, layer: str, tensors: Tensors) -> str:
        """Load these tensors of a layer; the error, empty without one."""
        # A draft model wants to see its layer.
        tensors = {**tensors, "attn_norm.weight": torch.ones(HIDDEN).bfloat16()}
        named = ((f"{layer}.{name}", value) for name, value in tensors.items())
        try:
            with model_configs.current(self._config):
                of_draft = self._owner != "model"
                self._model.load_weights(
                    published.checked(self._model, named, of_draft=of_draft)
                )
        except Exception as error:
            return str(error)
        return ""

    def parameter(self, name: str) -> torch.Tensor:
        return dict(self._model.named_parameters())[name].data.cpu()

    def held(self, layer: str, name: str, rows: int) -> torch.Tensor:
        """The scales that the layer's parameter now has, as float32."""
        (scale,) = (
            parameter.data.cpu()
            for full_name, parameter in self._model.named_parameters()
            if full_name.startswith(f"{layer}.")
            and HELD[name] in full_name
            and "weight_scale" in full_name
        )
        return values(scale[1] if name in EXPERTS else scale)[:rows]


@functools.cache
def loader(owner: str, expert_dtype: str = "fp4") -> Loader:
    return Loader(owner, expert_dtype)


def check_held(owner: str, expert_dtype: str, dtypes: dict[str, torch.dtype]) -> None:
    """Load a scale of each of these names, and compare what the parameters have."""
    checkpoint, model = LAYERS[owner]
    given = {
        name: scale_of(name, expert_dtype, dtype) for name, dtype in dtypes.items()
    }
    found = loader(owner, expert_dtype)
    error = found.load(checkpoint, {f"{name}.scale": s for name, s in given.items()})
    assert not error, error
    for name, scale in given.items():
        held = found.held(model, name, len(scale))
        assert torch.equal(held, values(scale)), (
            f"{name} of the {owner} is off by {(held / values(scale)).max():.3g}"
        )


def values(scale: torch.Tensor) -> torch.Tensor:
    """What a scale stands for: a byte e means 2^(e - 127)."""
    if scale.dtype == torch.float32:
        return scale
    return torch.exp2(scale.view(torch.uint8).float() - 127)


def scale_of(name: str, expert_dtype: str, dtype: torch.dtype = E8M0) -> torch.Tensor:
    """Powers of two from 2^-12 to 2^-5, a scale for each block or group."""
    rows, columns = SHAPES[name]
    mxfp4 = name in EXPERTS and expert_dtype == "fp4"
    grid = (rows, columns // GROUP) if mxfp4 else (rows // BLOCK, columns // BLOCK)
    exponents = torch.arange(grid[0] * grid[1]).view(grid) * 3 % 8 - 12
    return torch.exp2(exponents.float()).to(dtype)


def weight_of(name: str, dtype: torch.dtype, more: int = 0) -> torch.Tensor:
    rows, columns = SHAPES[name]
    return torch.randn(rows + more, columns).to(dtype)


def error_of(described: dict[str, Any], name: str, tensor: torch.Tensor) -> str:
    """What is said to a tensor of a checkpoint before it is loaded."""
    config = model_configs.hf_config()
    config.quantization_config = described
    try:
        ((given, passed),) = layout.module(published.CHECKS).check_tensors(
            config, [(name, tensor)]
        )
    except ValueError as error:
        return str(error)
    assert (given, passed is tensor) == (name, True)
    return ""
