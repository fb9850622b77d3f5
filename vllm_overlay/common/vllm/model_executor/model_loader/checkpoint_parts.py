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
# keep what the layer has put there. An indexer's k_norm is never used.
_NEEDED = re.compile(
    r"(?<!indexer\.k_norm)(?:^|\.)(?:(?:w13_|w2_)?"
    r"(?:q?weight|weight_packed|scales?|weight_scale(?:_inv|_2)?|weight_global_scale)"
    r"|attn_sink|ape|tid2eid|hc_\w+|e_score_correction_bias|bias_vl|image_\w+"
    r"|(?:vision|aligner)\..*bias)$"
)
# Of a draft model, which another class loads.
_DRAFT = "mtp."
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")
_SHOWN = 5


class PartsCheck:
    """Notes the tensors of a checkpoint, and finds what they lack.

    A model class whose `requires_scales` is true has no use for a quantized weight
    without a scale beside it, a scale without its weight, an expert without one of its
    parts, or a parameter that nothing was loaded into. Most loaders would leave what
    was in memory there.

    Args:
        local_experts: whose weights are read, if not all are
            (`--enable-ep-weight-filter`). Of the others only scales come.

    """

    def __init__(self, local_experts: set[int] | None) -> None:
        self._local_experts = local_experts
        self._quantized: dict[str, str] = {}
        self._scaled: set[str] = set()
        self._weighted: set[str] = set()
        self._experts: dict[str, dict[str, set[int]]] = {}

    def noted(self, weights: _Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        """The same tensors, which are noted while they are taken."""
        for name, tensor in weights:
            expert = _EXPERT.fullmatch(name)
            if not name.startswith(_DRAFT) and not (
                expert
                and self._local_experts
                and int(expert[2]) not in self._local_experts
            ):
                self._note(name, tensor, expert)
            yield name, tensor

    def check(self, model: nn.Module, loaded: set[str] | None) -> None:
        """Raise if `model` requires scales and something is lacking.

        Args:
            model: has taken all tensors.
            loaded: names of the parameters that it loaded; None if it does not say.

        Raises:
            ValueError: with the names of the tensors that are lacking.

        """
        if not getattr(model, "requires_scales", False):
            return
        parameters = {name for name, _ in model.named_parameters()}
        known = parameters if loaded is None else loaded
        unset = sorted(filter(_NEEDED.search, parameters - known))
        scales = [
            name for layer, name in self._quantized.items() if layer not in self._scaled
        ]
        scales = scales or [name for name in unset if name.endswith(_SCALE_ENDS)]
        if scales:
            raise ValueError(f"The checkpoint has no scale for {_listed(scales)}")
        lacking = [f"{layer}.weight" for layer in sorted(self._scaled - self._weighted)]
        lacking = lacking or _parts_of_experts(self._experts) or unset
        if lacking:
            raise ValueError(f"The checkpoint lacks {_listed(lacking)}")

    def _note(
        self, name: str, tensor: torch.Tensor, expert: re.Match[str] | None
    ) -> None:
        layer, _, leaf = name.rpartition(".")
        if leaf in _SCALES:
            self._scaled.add(layer)
        elif leaf in _WEIGHTS:
            self._weighted.add(layer)
            if leaf in _CODES or tensor.itemsize == 1:
                self._quantized[layer] = name
        if expert:
            parts = self._experts.setdefault(expert[1], {})
            parts.setdefault(expert[3], set()).add(int(expert[2]))


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
