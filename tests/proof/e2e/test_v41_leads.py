# SPDX-License-Identifier: Apache-2.0
"""Where the rounding twin is sure of another token than the engine, roundings decide.

On prompts that `test_v41.py` leaves out for that, the engine's inputs drift from the
twin's by little in every sublayer. The leads of its tokens are within the spread of
twins whose embeddings are nudged by up to half a step of bfloat16.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from test_v41 import KIND, ROOMY

from proof.e2e.running.serving import Engines, Prompt, Served
from proof.e2e.twins.comparison import by_request, logits_by_request, relative
from proof.e2e.twins.twin import Roundings
from proof.e2e.twins.v41_twin import V41Twin

pytestmark = [pytest.mark.newest, pytest.mark.full]

JOB = replace(
    ROOMY,
    name="v4.1, tokens that roundings decide",
    waves=(tuple(Prompt(60, 14, seed=seed) for seed in (21, 23, 25)),),
)
GROWS = 0.02
"""Most that one sublayer adds to how far inputs are apart."""
NUDGES = 12
SPREAD, FARTHEST = 1.6, 4.5
"""In deviations of the nudged leads: root of the mean square, and the farthest."""


@pytest.fixture
def served(engines: Engines, release: str) -> tuple[Served, V41Twin]:
    if not engines.has_v41(release):
        pytest.skip(f"{release} refuses V4.1 on XPU")
    twin = engines.twin_of(KIND)
    assert isinstance(twin, V41Twin)
    return engines.serve(release, JOB), twin


@pytest.mark.serves(JOB)
def test_no_single_layer_causes_it(served: tuple[Served, V41Twin]) -> None:
    result, twin = served
    for request in result.texts:
        apart = inputs_apart(result, twin, request)
        print(request, {name: round(error, 4) for name, error in apart.items()})
        errors = list(apart.values())
        assert errors[0] == 0.0
        for before, after in pairwise(errors):
            assert after < before + GROWS, apart


def inputs_apart(result: Served, twin: V41Twin, request: str) -> dict[str, float]:
    """How far each sublayer's input is from that of the rounding twin's own run."""
    text, apart = result.texts[request], dict[str, float]()
    inputs = {part: by_request(result.answer, part) for part in ("attn", "ffn")}

    def own(part: str, layer: int, x: torch.Tensor) -> torch.Tensor:
        seen = inputs[part][request, layer].input
        apart[f"{part} {layer}"] = relative(seen, x[: len(seen)])
        if part == "attn":
            return twin.attention(layer, x, None, text)
        return twin.feed_forward(layer, x, text)

    with twin.rounded(Roundings.of(result.answer)):
        twin.states(text, own)
    return apart


@pytest.mark.serves(JOB)
def test_leads_are_those_of_other_roundings(served: tuple[Served, V41Twin]) -> None:
    result, twin = served
    off: list[float] = []
    for request, found in logits_by_request(result.answer).items():
        text = result.texts[request]
        runs = torch.stack([nudged(result, twin, text, n) for n in range(NUDGES)])
        for position, values in found.items():
            if not 59 <= position < len(text) - 1:
                continue
            token = text[position + 1]
            best = runs[:, position].mean(0).topk(2).indices.tolist()
            other = best[0] if best[0] != token else best[1]
            leads = runs[:, position, token] - runs[:, position, other]
            own = values[token] - values[other]
            off.append(float((own - leads.mean()) / leads.std()))
    spread = (sum(z * z for z in off) / len(off)) ** 0.5
    print(
        f"{len(off)} leads: {spread:.2f} deviations, at most {max(map(abs, off)):.2f}"
    )
    assert spread < SPREAD and max(map(abs, off)) < FARTHEST, off


def nudged(result: Served, twin: V41Twin, text: list[int], seed: int) -> torch.Tensor:
    """Logits of the rounding twin, each value of whose embedding is off by up to half
    the step of bfloat16."""
    drawn = torch.Generator().manual_seed(seed)
    plain = twin.weights["embed.weight"]
    noise = torch.rand(plain.shape, generator=drawn) - 0.5
    twin.weights["embed.weight"] = plain * (1 + noise * 2**-8)
    try:
        with twin.rounded(Roundings.of(result.answer)):
            return twin.logits(text)
    finally:
        twin.weights["embed.weight"] = plain
