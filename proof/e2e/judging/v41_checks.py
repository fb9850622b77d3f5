# SPDX-License-Identifier: Apache-2.0
"""What V4.1's engines are held to besides the checks of V4: the streams between layers.

The twin takes what the engine's sublayers gave and makes of it the input of each next
one. That shows hyper-connections and Engram by themselves, and the output head.
"""

import torch

from proof.e2e.running.serving import Served
from proof.e2e.twins.comparison import by_request, logits_by_request, relative
from proof.e2e.twins.twin import Roundings
from proof.e2e.twins.v41_twin import V41Twin

STREAMS = 1e-2

Errors = dict[tuple[str, int], float]
"""By sublayer and layer; ("head", depth) for the logits."""


def stream_errors(result: Served, twin: V41Twin) -> Errors:
    """The worst over the requests."""
    found: Errors = {}
    inputs = {part: by_request(result.answer, part) for part in ("attn", "ffn")}
    logits = logits_by_request(result.answer, last=True)

    def note(name: tuple[str, int], error: float) -> None:
        found[name] = max(error, found.get(name, 0.0))

    for request, text in result.texts.items():
        count = len(inputs["attn"][request, 0].input)

        def answer(
            part: str, layer: int, x: torch.Tensor, request: str = request
        ) -> torch.Tensor:
            seen = inputs[part][request, layer]
            own = slice(seen.first, None)
            note((part, layer), relative(x[own], seen.input[own]))
            return seen.output

        with twin.rounded(Roundings.of(result.answer)):
            states = twin.states(text[:count], answer)
            wanted = twin.spoken(states)
        for position, values in logits[request].items():
            note(("head", twin.depth), relative(values, wanted[position]))
    return found


def check_streams(result: Served, twin: V41Twin) -> Errors:
    """Hold the inputs of all sublayers and the logits to their bound."""
    errors = stream_errors(result, twin)
    print({name: round(error, 5) for name, error in errors.items()})
    assert ("head", twin.depth) in errors, "no logits were compared"
    assert max(errors.values()) <= STREAMS, errors
    for (part, layer), error in errors.items():
        result.note("logits" if part == "head" else layer, streams=error)
    return errors
