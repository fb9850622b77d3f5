# SPDX-License-Identifier: Apache-2.0
"""Calls of routed experts at the slices that ranks have of the models' experts."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import gcd

import torch

from kernels.xpu_dsv4._launch import cdiv
from kernels.xpu_dsv4.moe._experts_formats import FP8, INT4, MXFP4, Format
from lab.aot.calls.shapes import Case, Sizes, f32, i32, meta, op, u8

LIMIT = 10.0
BETWEEN = (2, 4, 1024)
"""Tokens at which an odd slice takes a form of its own."""
PARALLEL = (1, 2, 4, 8)
"""Ranks that share each expert, or the experts."""


@dataclass(frozen=True)
class Experts:
    """What a model's routed experts are.

    Attributes:
        name: of the model.
        hidden: hidden size.
        intermediate: columns of the gate of a whole expert.
        count: of the experts of a layer.
        topk: experts of a token.
    """

    name: str
    hidden: int
    intermediate: int
    count: int
    topk: int


EXPERTS = (
    Experts("Flash", 4096, 2048, 256, 6),
    Experts("Pro", 7168, 1536, 384, 6),
    Experts("V4.1", 5120, 2304, 256, 6),
)


QUANTIZED = {"FP8": FP8, "INT4": INT4}
"""Formats beside MXFP4 in which Flash and Pro are published."""


def experts(
    model: Experts,
    tokens: int,
    form: Format = MXFP4,
    /,
    *,
    tensor: int = 1,
    expert: int = 1,
) -> object:
    """The experts of a rank of `tensor` tensor-parallel or `expert` expert-parallel
    ones. Blocks of FP8 are as small as vLLM makes them where ranks cut them."""
    hidden, columns = model.hidden, model.intermediate // tensor
    count = model.count // expert
    block = form.columns, form.values
    if form == FP8:
        block = (gcd(128, columns),) * 2

    def weight(rows: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales = cdiv(rows, block[0]), cdiv(depth, block[1])
        return (
            meta(count, rows, form.width(depth), dtype=form.codes),
            meta(count, *scales, dtype=form.scales),
        )

    return op("moe.experts", "routed_experts")(
        meta(tokens, hidden),
        *weight(2 * columns, hidden),
        *weight(hidden, columns),
        meta(tokens, model.topk, dtype=f32),
        meta(tokens, model.topk, dtype=i32),
        meta(model.count, dtype=i32) if expert > 1 else None,
        LIMIT,
        scale_block=None if form == MXFP4 else block,
    )


def fetch(model: Experts, tokens: int, *, tensor: int, slots: int) -> object:
    """Both waves' kinds of a step whose experts lie in host memory."""
    hidden, columns = model.hidden, model.intermediate // tensor
    cache = op("moe.expert_cache", "make_expert_cache")(
        (
            meta(model.count, 2 * columns, hidden // 2, dtype=u8),
            meta(model.count, 2 * columns, hidden // 32, dtype=u8),
            meta(model.count, hidden, columns // 2, dtype=u8),
            meta(model.count, hidden, columns // 32, dtype=u8),
        ),
        slots,
        torch.device("meta"),
    )
    ids = meta(tokens, model.topk, dtype=i32)
    for wave in (0, 1):
        op("moe.expert_cache", "fetch_experts")(cache, ids, wave)
    return cache


def fetch_cases(sizes: Sizes) -> Iterator[Case]:
    """Each model on one to four ranks, with the slots that fit on a B70."""
    for model in EXPERTS:
        for tokens in (1, sizes.chunks[-1]):
            for tensor, slots in ((1, 27), (2, 60), (4, 125)):
                made = partial(fetch, model, tokens, tensor=tensor, slots=slots)
                label = f"{model.name} TP{tensor} T{tokens}"
                yield Case("expert cache", label, made)


def experts_cases(sizes: Sizes) -> Iterator[Case]:
    """Each model in MXFP4, Flash and Pro in FP8 and INT4 as well."""
    yield from _cases_of(EXPERTS, "", MXFP4, sizes)
    for name, form in QUANTIZED.items():
        yield from _cases_of(EXPERTS[:2], f" {name}", form, sizes)


def _cases_of(
    models: tuple[Experts, ...], name: str, form: Format, sizes: Sizes
) -> Iterator[Case]:
    """Each model at each tensor-parallel and expert-parallel size."""
    for model in models:
        for tokens in sorted({*sizes.tokens, *BETWEEN, *sizes.chunks}):
            for ranks in PARALLEL:
                for kind, short in (("tensor", "TP"), ("expert", "EP")):
                    if ranks > 1 or kind == "tensor":
                        made = partial(experts, model, tokens, form, **{kind: ranks})
                        label = f"{model.name}{name} {short}{ranks} T{tokens}"
                        yield Case("experts", label, made)
