# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Names the tensors that a checkpoint lacks."""

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import regex as re
import torch
from torch import nn

_Tensors: TypeAlias = Iterable[tuple[str, torch.Tensor]]

_CODES = ("qweight", "weight_packed")
_WEIGHTS = ("weight", *_CODES)
_SCALES = ("scale", "scales", "weight_scale", "weight_scale_inv")
_SCALE_ENDS = tuple(f".{name}" for name in _SCALES)
# Parameters that no default replaces. Others, such as zero points of symmetric codes,
# keep what the layer has put there.
_NEEDED = re.compile(
    r"(?:^|\.)(?:(?:w13_|w2_)?"
    r"(?:[qk]?_?weight|weight_packed|scales?|weight_scale(?:_inv|_2)?"
    r"|weight_global_scale)"
    r"|attn_sink|ape|tid2eid|hc_\w+|e_score_correction_bias|bias_vl|image_\w+"
    r"|(?:vision|aligner)\..*bias)$"
)
# Of a draft model, which another class loads.
_DRAFT = "mtp."
# What a draft has from its model, wherever the checkpoint has it.
_SHARED = re.compile(r"(?:^|\.)(?:embed_tokens|lm_head|shared_head\.head)\.weight$")
# What a fused layer is made of, by the module around it; one with a single output has
# the first part alone.
_FUSED = {
    "attn": ("fused_wqa_wkv", ("wq_a", "wkv")),
    "compressor": ("fused_wkv_wgate", ("wkv", "wgate")),
    "shared_experts": ("gate_up_proj", ("w1", "w3")),
}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")
_SHOWN = 5


class PartsCheck:
    """Notes the tensors of a checkpoint, and finds what they lack.

    A model has no use for a quantized weight
    without a scale beside it, a scale without its weight, an expert or a fused layer
    without one of its parts, or a parameter that nothing was loaded into. Most loaders
    would leave what was in memory there.

    Args:
        local_experts: whose weights are read, if not all are
            (`--enable-ep-weight-filter`). Of the others only scales come.

    """

    def __init__(self, local_experts: set[int] | None) -> None:
        self._local_experts = local_experts
        self._of_model, self._of_draft = _Noted(), _Noted()

    def noted(self, weights: _Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        """The same tensors, which are noted while they are taken."""
        for name, tensor in weights:
            expert = _EXPERT.fullmatch(name)
            if not (
                expert
                and self._local_experts
                and int(expert[2]) not in self._local_experts
            ):
                draft = name.startswith(_DRAFT)
                (self._of_draft if draft else self._of_model).note(name, tensor, expert)
            yield name, tensor

    def check(self, model: nn.Module, loaded: set[str] | None, *, draft: bool) -> None:
        """Raise if something is lacking.

        Args:
            model: has taken all tensors.
            loaded: names of the parameters that it loaded; None if it does not say.
            draft: whether it is the checkpoint's draft; else it is the rest of it.

        Raises:
            ValueError: with the names of the tensors that are lacking.

        """
        noted = self._of_draft if draft else self._of_model
        parameters = {name for name, _ in model.named_parameters()}
        known = parameters if loaded is None else loaded
        unset = sorted(filter(_NEEDED.search, parameters - known))
        unset = [name for name in unset if not _is_unused(name, parameters, draft)]
        scales = [name for layer, name in noted.quantized if layer not in noted.scaled]
        scales = scales or [name for name in unset if name.endswith(_SCALE_ENDS)]
        owner = "The checkpoint's draft" if draft else "The checkpoint"
        if scales:
            raise ValueError(f"{owner} has no scale for {_listed(scales)}")
        lacking = [f"{layer}.weight" for layer in sorted(noted.scaled - noted.weighted)]
        lacking = lacking or _parts_of_experts(noted.experts)
        lacking = lacking or _parts_of_layers(noted.weighted, model) or unset
        if lacking:
            raise ValueError(f"{owner} lacks {_listed(lacking)}")


class _Noted:
    """Layers by what a checkpoint has of them."""

    def __init__(self) -> None:
        self.quantized: list[tuple[str, str]] = []
        self.scaled: set[str] = set()
        self.weighted: set[str] = set()
        self.experts: dict[str, dict[str, set[int]]] = {}

    def note(
        self, name: str, tensor: torch.Tensor, expert: re.Match[str] | None
    ) -> None:
        layer, _, leaf = name.rpartition(".")
        if leaf in _SCALES:
            self.scaled.add(layer)
        elif leaf in _WEIGHTS:
            self.weighted.add(layer)
            if leaf in _CODES or tensor.itemsize == 1:
                self.quantized.append((layer, name))
        if expert:
            parts = self.experts.setdefault(expert[1], {})
            parts.setdefault(expert[3], set()).add(int(expert[2]))


def _is_unused(name: str, parameters: set[str], draft: bool) -> bool:
    """Whether the checkpoint need not have a parameter: a draft has some from its
    model, and an indexer that makes no keys itself does not normalize them."""
    if name.endswith(".indexer.k_norm.weight"):
        return name.replace(".k_norm.", ".wk.") not in parameters
    return draft and _SHARED.search(name) is not None


def _parts_of_layers(weighted: set[str], model: nn.Module) -> list[str]:
    """The weights of fused layers of which others came."""
    outputs = {
        path[path.find("layers.") :]: len(getattr(module, "output_sizes", "ab"))
        for path, module in model.named_modules()
    }
    lacking = []
    for owner in sorted({layer.rpartition(".")[0] for layer in weighted}):
        kind = owner.rpartition(".")[2]
        fused, parts = _FUSED.get(kind, ("", ()))
        # Of compressors a model alone knows whether they have a gate, and of those of
        # other pipeline stages nothing.
        count = outputs.get(f"{owner}.{fused}", 0 if kind == "compressor" else 2)
        missing = [part for part in parts[:count] if f"{owner}.{part}" not in weighted]
        if len(missing) < count:
            lacking += [f"{owner}.{part}.weight" for part in missing]
    return lacking


def _parts_of_experts(experts: dict[str, dict[str, set[int]]]) -> list[str]:
    """The tensors that an expert of a layer lacks: all layers have the same experts,
    and the experts of a layer the same tensors in each of their matrices."""
    parts = [(part, ids) for layer in experts.values() for part, ids in layer.items()]
    everyone = set().union(*(ids for _, ids in parts))
    matrices = sorted({part.partition(".")[0] for part, _ in parts})
    return [
        f"{prefix}.{expert}.{matrix}.{leaf}"
        for prefix, layer in experts.items()
        for leaf in sorted({part.partition(".")[2] for part in layer})
        for matrix in matrices
        for expert in sorted(everyone - layer.get(f"{matrix}.{leaf}", set()))
    ]


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{shown}{more}"
