# SPDX-License-Identifier: Apache-2.0
"""The scales of a checkpoint keep their values; what XPU would misread is refused."""

import functools
from typing import Any

import pytest
import torch
from helpers import layout, model_configs, quantizations

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
every_owner = pytest.mark.parametrize("owner", LAYERS)


class Loader:
    """A model of three small layers, or its draft model, and its own loader."""

    def __init__(self, owner: str, expert_dtype: str, kind: str = "") -> None:
        self._config = model_configs.vllm_config(speculative_tokens=1, quantized=True)
        self.hf_config = self._config.model_config.hf_config
        if kind:
            self.hf_config.quantization_config = PLANTED[kind][0]
            self._config.quant_config = quantizations.config_of(PLANTED[kind][0])
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
                self._model.load_weights(named)
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


class NoExperts(torch.nn.Module):
    """In place of experts: a release may lack those of a quantization before the step
    that refuses it."""

    use_mega_moe = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def finalize_mega_moe_weights(self) -> None:
        """Nothing is packed."""


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


@every_owner
@pytest.mark.parametrize("linears", [E8M0, torch.float32])
def test_e8m0_scales_of_fp8_experts(owner: str, linears: torch.dtype) -> None:
    dtypes = dict.fromkeys(EXPERTS, E8M0) | dict.fromkeys(LINEARS, linears)
    check_held(owner, "fp8", dtypes)


def unless_rounded(test: Any) -> Any:
    """Mark a test `unchanged` where the loader of MXFP4 experts rounds float32 scales
    itself, which leaves powers of two as they are."""
    return pytest.mark.unchanged(test) if layout.RELEASE >= (0, 31) else test


@unless_rounded
@every_owner
def test_float32_scales_of_mxfp4_experts(owner: str) -> None:
    check_held(owner, "fp4", dict.fromkeys(EXPERTS, torch.float32))


@pytest.mark.unchanged
@every_owner
@pytest.mark.parametrize("linears", [E8M0, torch.float32])
def test_float32_scales_of_fp8_experts(owner: str, linears: torch.dtype) -> None:
    dtypes = dict.fromkeys(EXPERTS, torch.float32) | dict.fromkeys(LINEARS, linears)
    check_held(owner, "fp8", dtypes)


@pytest.mark.unchanged
@every_owner
@pytest.mark.parametrize("linears", [E8M0, torch.float32])
@pytest.mark.parametrize("described", ["ue8m0", None])
def test_powers_of_two_beside_mxfp4_experts(
    owner: str, linears: torch.dtype, described: str | None
) -> None:
    quantization = loader(owner).hf_config.quantization_config
    quantization["scale_fmt"] = described
    if described is None:
        del quantization["scale_fmt"]
    dtypes = dict.fromkeys(EXPERTS, E8M0) | dict.fromkeys(LINEARS, linears)
    check_held(owner, "fp4", dtypes)


@pytest.mark.unchanged
def test_float32_scales_that_are_no_powers_of_two_beside_fp8_experts() -> None:
    scale = scale_of("attn.wq_b", "fp8", torch.float32) * 1.1
    found = loader("model", "fp8")
    assert found.load("layers.1", {"attn.wq_b.scale": scale}) == ""
    held = found.held("model.layers.1", "attn.wq_b", len(scale))
    assert torch.equal(held, scale)


def weight_of(name: str, dtype: torch.dtype, more: int = 0) -> torch.Tensor:
    rows, columns = SHAPES[name]
    return torch.randn(rows + more, columns).to(dtype)


Q, X = "attn.wq_b", "ffn.experts.1.w1"
_SCALE, _FP8_SCALE = scale_of(Q, "fp4"), scale_of(X, "fp8")
_MXFP4_SCALE, _FLOAT = scale_of(X, "fp4"), scale_of(Q, "fp4", torch.float32)
_TABLE = torch.arange(256).view(128, 2) % 4
# What a checkpoint has of which tensor, with experts in which format.
BAD: dict[str, tuple[str, str, torch.Tensor]] = {
    "float32 between powers of two": ("fp4", f"1.{Q}.scale", _FLOAT * 1.1),
    "float32 below zero": ("fp4", f"1.{Q}.scale", -_FLOAT),
    "float32 of MXFP4": ("fp4", f"1.{X}.scale", _MXFP4_SCALE.float() * 1.1),
    "NaN in float32": ("fp8", f"1.{X}.scale", _FP8_SCALE.float() * torch.nan),
    "bfloat16 scales": ("fp4", f"1.{Q}.scale", _SCALE.bfloat16()),
    "bytes": ("fp4", f"1.{Q}.scale", _SCALE.view(torch.uint8)),
    "bytes of an expert": ("fp8", f"1.{X}.scale", _FP8_SCALE.view(torch.uint8)),
    "NaN": ("fp4", f"1.{Q}.scale", torch.full_like(_SCALE, torch.nan)),
    "NaN of MXFP4": ("fp4", f"1.{X}.scale", torch.full_like(_MXFP4_SCALE, torch.nan)),
    "NaN of an expert": ("fp8", f"1.{X}.scale", torch.full_like(_FP8_SCALE, torch.nan)),
    "blocks of 64 rows": ("fp4", f"1.{Q}.scale", _SCALE.repeat_interleave(2, 0)),
    "one scale for all": ("fp8", f"1.{X}.scale", _FP8_SCALE[:, :1]),
    "one scale for a row": ("fp4", f"1.{X}.scale", _MXFP4_SCALE[:, :1]),
    "e5m2": ("fp4", f"1.{Q}.weight", weight_of(Q, torch.float8_e5m2)),
    "e5m2 experts": ("fp8", f"1.{X}.weight", weight_of(X, torch.float8_e5m2)),
    "a BF16 layer": ("fp4", f"1.{Q}.weight", weight_of(Q, torch.bfloat16)),
    "BF16 experts": ("fp8", f"1.{X}.weight", weight_of(X, torch.bfloat16)),
    "FP8 instead of MXFP4": ("fp4", f"1.{X}.weight", weight_of(X, E4M3)),
    "more rows": ("fp4", f"1.{Q}.weight", weight_of(Q, E4M3, 128)),
    "more rows of an expert": ("fp8", f"1.{X}.weight", weight_of(X, E4M3, 128)),
    "an FP8 norm": ("fp4", "1.ffn_norm.weight", torch.ones(HIDDEN).to(E4M3)),
    "more sinks": ("fp4", "1.attn.attn_sink", torch.rand(layout.HEADS + 1)),
    "float64 sinks": ("fp4", "1.attn.attn_sink", torch.rand(layout.HEADS).double()),
    "a float64 bias": ("fp4", "1.ffn.gate.bias", torch.rand(4).double()),
    "an integer router": ("fp4", "1.ffn.gate.weight", torch.ones(4, HIDDEN).int()),
    "a float table": ("fp4", "0.ffn.gate.tid2eid", _TABLE.float()),
    "a table of other experts": ("fp4", "0.ffn.gate.tid2eid", _TABLE + 1),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(case: str) -> None:
    expert_dtype, name, tensor = BAD[case]
    layer, name = name.split(".", 1)
    error = loader("model", expert_dtype).load(f"layers.{layer}", {name: tensor})
    named = f"layers.{layer}.{name} " in error
    assert named, f"{case} is served, or the error names no tensor: {error!r}"


ROWS, COLUMNS = SHAPES[Q]
_ROW_SCALES, _FP8 = torch.rand(ROWS, 1) + 1, weight_of(Q, E4M3)
_SIXTEENS = torch.rand(ROWS, COLUMNS // 16).to(E4M3)
_ZEROS = torch.full((1, ROWS // 8), 0x77777777, dtype=torch.int32)
# What a server of this kind would read as other values, of the linear layer `Q`.
WRONG: dict[str, dict[str, torch.Tensor]] = {
    "FP8 by rows": {
        "weight": weight_of(Q, torch.float8_e5m2),
        "weight_scale": _ROW_SCALES * torch.nan,
    },
    "FP8 in blocks": {"weight_scale": torch.rand(ROWS // 64, 1)},
    "NVFP4": {"weight_scale": _SIXTEENS.view(torch.uint8)},
    "NVFP4 by ModelOpt": {
        "weight_scale": _SIXTEENS.float(),
        "weight_scale_2": torch.tensor(torch.nan),
    },
    "MXFP4": {"weight_scale": torch.ones(ROWS, COLUMNS // GROUP).to(E8M0)},
    "MXFP8": {
        "weight": weight_of(Q, torch.float8_e5m2),
        "weight_scale": torch.rand(ROWS, COLUMNS // GROUP),
    },
    "INT4": {"weight_scale": _ROW_SCALES * torch.inf},
    "AutoRound": {"qzeros": _ZEROS + 1, "scales": _ROW_SCALES.T.half() * torch.nan},
    "GPTQ": {"qzeros": _ZEROS - 1, "g_idx": torch.ones(COLUMNS, dtype=torch.int32)},
    "experts in MXFP4": {"weight": _FP8},
}
# Those that this release serves.
PLANTED = {
    kind: (described, wrong)
    for kind, wrong in WRONG.items()
    for described, served in [quantizations.KINDS[kind]]
    if served
}


if PLANTED:

    @pytest.mark.parametrize("kind", PLANTED)
    def test_refused_of_another_quantization(
        kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(layout.module(layout.MODEL), "DeepseekV4MoE", NoExperts)
        found = Loader("model", "fp4", kind)
        for leaf, tensor in PLANTED[kind][1].items():
            error = found.load("layers.1", {f"{Q}.{leaf}": tensor})
            named = f"layers.1.{Q}.{leaf} " in error
            assert named, f"{leaf} is served, or the error names no tensor: {error!r}"


def error_of(described: dict[str, Any], name: str, tensor: torch.Tensor) -> str:
    """What is said to a tensor of a checkpoint before it is loaded."""
    found = "vllm.model_executor.model_loader.deepseek_v4_checkpoint"
    config = model_configs.hf_config()
    config.quantization_config = described
    try:
        ((given, passed),) = layout.module(found).check_tensors(
            config, [(name, tensor)]
        )
    except ValueError as error:
        return str(error)
    assert (given, passed is tensor) == (name, True)
    return ""


OTHERS = [kind for kind in WRONG if kind != "experts in MXFP4"]


@pytest.mark.parametrize("layer", [Q, "ffn.experts.1.w2"])
@pytest.mark.parametrize("kind", OTHERS)
def test_each_tensor_of_another_quantization(kind: str, layer: str) -> None:
    described = quantizations.KINDS[kind][0]
    rows, columns = SHAPES[layer]
    for leaf, tensor in quantizations.stored(kind, rows, columns).items():
        name = f"layers.1.{layer}.{leaf}"
        assert error_of(described, name, tensor) == ""
        larger = tensor.view(torch.uint8) if tensor.dtype == E4M3 else tensor
        larger = larger.reshape(-1, *tensor.shape[1:]).repeat_interleave(2, 0)
        for bad in (tensor.double(), larger.view(tensor.dtype)):
            assert f"{name} " in error_of(described, name, bad), (leaf, bad.shape)


@pytest.mark.parametrize(
    ("kept", "name", "passes"),
    [
        ("head", Q, False),
        (f"layers.1.{Q}", Q, True),
        (f"model.layers.1.{Q}", Q, True),
        (Q, Q, True),
        ("re:.*attn.*", Q, True),
        ("*.attn.*", Q, True),
        (X, X, False),
    ],
)
def test_a_layer_in_bf16_must_be_listed(kept: str, name: str, passes: bool) -> None:
    """Beside codes in the other half of a fused weight nobody would write its scale."""
    described = quantizations.KINDS["DeepSeek's own"][0] | {"ignored_layers": [kept]}
    error = error_of(
        described, f"layers.1.{name}.weight", weight_of(name, torch.bfloat16)
    )
    assert (f"layers.1.{name}.weight " in error) != passes, error


@pytest.mark.parametrize(
    ("name", "rows"),
    [(f"layers.1.{Q}", ROWS), ("layers.1.attn.compressor.wkv", 1024)],
)
def test_more_rows_in_16_bits(name: str, rows: int) -> None:
    """Of a linear layer, and of a ratio-4 layer's compressor; a loader would cut."""
    described = quantizations.KINDS["DeepSeek's own"][0] | {"ignored_layers": [name]}
    name = f"{name}.weight"
    columns = COLUMNS if Q in name else HIDDEN
    given = torch.zeros(rows, columns).bfloat16()
    assert error_of(described, name, given) == ""
    assert f"{name} " in error_of(described, name, torch.cat((given, given)))


@pytest.mark.parametrize("group", [COLUMNS, 64])
def test_columns_in_groups_of_another_size(group: int) -> None:
    name = f"layers.1.{Q}.g_idx"
    indices = torch.arange(2 * COLUMNS, dtype=torch.int32) // group
    described = quantizations.KINDS["GPTQ"][0]
    assert f"{name} " in error_of(described, name, indices)


@pytest.mark.parametrize("size", [64, 256])
def test_sizes_of_groups_that_nobody_ran(size: int) -> None:
    other = {"block_structure": [size, size]}
    by = quantizations.BY_GROUP | {"group_size": size}
    blocks = quantizations.compressed(8, "float", "block", by, **other)
    grid = ROWS // size, -(-COLUMNS // size)
    name = f"layers.1.{Q}.weight_scale"
    assert f"{name} " in error_of(blocks, name, torch.ones(grid).float())


def test_experts_alone_in_nvfp4() -> None:
    """Those of the model; a draft's stay as DeepSeek publishes them."""
    described = quantizations.KINDS["DeepSeek's own"][0] | {"moe_quant_algo": "NVFP4"}
    for leaf, tensor in quantizations.stored(
        "NVFP4 by ModelOpt", INTER, HIDDEN
    ).items():
        name = f"layers.1.{X}.{leaf}"
        assert error_of(described, name, tensor) == ""
        assert f"{name} " in error_of(described, name, tensor.double())
    name = f"layers.1.{X}.scale"
    assert f"{name} " in error_of(described, name, _MXFP4_SCALE)


@pytest.mark.unchanged
@pytest.mark.parametrize("name", [f"{Q}.weight", f"{X}.weight", f"{Q}.scale"])
def test_the_model_passes_its_draft_s_tensors_by(name: str) -> None:
    """They may be in another format, and a server without drafts does not read them."""
    given = {name: torch.ones(3, 5).bfloat16()}
    assert loader("model").load("mtp.0", given) == ""


@pytest.mark.unchanged
def test_float32_norms_are_rounded() -> None:
    norm = torch.linspace(0.9, 1.1, HIDDEN)
    assert loader("model").load("layers.1", {"ffn_norm.weight": norm}) == ""
    held = loader("model").parameter("model.layers.1.ffn_norm.weight")
    assert torch.equal(held, norm.bfloat16())


if not layout.WITH_XPU_FOLDER:

    @pytest.mark.unchanged
    @every_owner
    def test_other_platforms_load_as_before(
        monkeypatch: pytest.MonkeyPatch, owner: str
    ) -> None:
        module = layout.module(layout.MTP if owner == "mtp" else layout.MODEL)
        other = layout.another_platform(module.current_platform)
        monkeypatch.setattr(module, "current_platform", other)
        given = {f"{Q}.scale": _FLOAT * 1.1}
        assert loader(owner).load(LAYERS[owner][0], given) == ""
