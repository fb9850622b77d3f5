# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Names the tensor of a checkpoint that does not fit, is lacking or is cut off."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias, cast

import regex as re
import torch
from safetensors import SafetensorError, safe_open
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
_SENTENCE_END = re.compile(r"\n|(?<=\.)\s+(?=[A-Z])")


def load_checked(
    model: nn.Module, weights: _Tensors, local_experts: set[int] | None = None
) -> set[str] | None:
    """Load all tensors of a checkpoint, and name the one at which that fails.

    A model class whose `requires_scales` is true has no use for a quantized weight
    without a scale beside it, a scale without its weight, an expert without one of its
    parts, or a parameter that nothing was loaded into. Most loaders would leave what
    was in memory there.

    Args:
        model: takes the tensors by its `load_weights`.
        weights: tensors by their names in the checkpoint.
        local_experts: whose weights are read, if not all are
            (`--enable-ep-weight-filter`). Of the others only scales come.

    Raises:
        ValueError: a tensor cannot be loaded, or is lacking.

    """
    load = cast(Callable[[_Tensors], set[str] | None], model.load_weights)
    quantized: dict[str, str] = {}
    scaled: set[str] = set()
    weighted: set[str] = set()
    experts: dict[str, dict[str, set[int]]] = {}
    current = ""

    def note(name: str, tensor: torch.Tensor, expert: re.Match[str] | None) -> None:
        layer, _, leaf = name.rpartition(".")
        if leaf in _SCALES:
            scaled.add(layer)
        elif leaf in _WEIGHTS:
            weighted.add(layer)
            if leaf in _CODES or tensor.itemsize == 1:
                quantized[layer] = name
        if expert:
            parts = experts.setdefault(expert[1], {})
            parts.setdefault(expert[3], set()).add(int(expert[2]))

    def noted() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal current
        for name, tensor in weights:
            current = f"{name} ({tensor.dtype}, {tuple(tensor.shape)})"
            expert = _EXPERT.fullmatch(name)
            if not name.startswith(_DRAFT) and not (
                expert and local_experts and int(expert[2]) not in local_experts
            ):
                note(name, tensor, expert)
            yield name, tensor
            current = ""

    try:
        loaded = load(noted())
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if not current:
            raise
        raise ValueError(
            f"{current} of the checkpoint cannot be loaded: "
            f"{type(error).__name__}: {_reason(error)}"
        ) from error
    if not getattr(model, "requires_scales", False):
        return loaded
    parameters = {name for name, _ in model.named_parameters()}
    known = parameters if loaded is None else loaded
    unset = sorted(filter(_NEEDED.search, parameters - known))
    scales = [name for layer, name in quantized.items() if layer not in scaled]
    scales = scales or [name for name in unset if name.endswith(_SCALE_ENDS)]
    if scales:
        raise ValueError(f"The checkpoint has no scale for {_listed(scales)}")
    lacking = [f"{layer}.weight" for layer in sorted(scaled - weighted)]
    lacking = lacking or _parts_of_experts(experts) or unset
    if lacking:
        raise ValueError(f"The checkpoint lacks {_listed(lacking)}")
    return loaded


def open_shard(st_file: str) -> safe_open:
    """Open a safetensors file for PyTorch.

    Raises:
        SafetensorError: it cannot be opened. The message names the file, and the first
            tensor that it does not hold to its end.

    """
    try:
        return safe_open(st_file, framework="pt")
    except SafetensorError as error:
        cut = _first_cut(st_file)
        ending = f"; the file ends before the end of {cut}" if cut else ""
        raise SafetensorError(f"{st_file}: {error}{ending}") from error


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


def _first_cut(st_file: str) -> str:
    """The first tensor that a truncated safetensors file does not hold to its end;
    empty if it holds all, or if its header is damaged.

    The format: eight bytes with the length of the header, the header in JSON with the
    range of each tensor behind it, and the tensors.
    """
    with open(st_file, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length < size else b""
    try:
        ends = {
            name: entry["data_offsets"][1]
            for name, entry in json.loads(header).items()
            if name != "__metadata__"
        }
    except (AttributeError, LookupError, TypeError, ValueError):
        return ""
    cut = [name for name, end in ends.items() if 8 + length + end > size]
    return min(cut, key=lambda name: ends[name], default="")


def _reason(error: Exception) -> str:
    """The first sentence of an error. A list of all parameters may follow it, which
    stays in the traceback."""
    return _SENTENCE_END.split(str(error), maxsplit=1)[0]
