# SPDX-License-Identifier: Apache-2.0
"""The parts of a layer: each runs in a function that is given its name."""

import re
from collections.abc import Callable
from typing import Any

import torch

BY_CLASS = {
    r"Compressor$": "compressor",
    r"Indexer(Op)?$|SparseAttnIndexer": "indexer",
    r"^MHC|^HC": "hyper-connections",
    r"MoE$": "experts",
    r"Linear$": "projections",
}
BY_METHOD = {
    "forward_mqa": "attention",
    "_fused_qnorm_rope_kv_insert": "insert",
    "_o_proj": "projections",
}
WHOLE = {"indexer", "experts", "compressor"}
"""Parts whose inner modules belong to them, whatever they are."""


def name_parts(
    model: torch.nn.Module,
    named: Callable[[str, Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Replace what runs a part of the model by what `named` makes of it."""
    owners: dict[str, str] = {}
    for name, module in model.named_modules():
        outer = [part for owner, part in owners.items() if name.startswith(owner + ".")]
        if any(part in WHOLE and part != "compressor" for part in outer):
            continue
        part = part_of_class(type(module).__name__)
        if part and not (part == "projections" and outer):
            owners[name] = part
            module.forward = named(part, module.forward)
        for method, part in BY_METHOD.items():
            if hasattr(module, method) and hasattr(module, "swa_cache_layer"):
                setattr(module, method, named(part, getattr(module, method)))


def part_of_class(name: str) -> str | None:
    found = (part for pattern, part in BY_CLASS.items() if re.search(pattern, name))
    return next(found, None)
