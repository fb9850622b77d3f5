# SPDX-License-Identifier: Apache-2.0
"""What the layers of V4.1's draft are held to: their inputs are an engine's."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from proof.e2e.checkpoints import v41
from proof.e2e.judging.checks import EXPERTS, PLAIN, ROUNDED, TIGHT
from proof.e2e.judging.v41_checks import STREAMS
from proof.e2e.running.serving import Served
from proof.e2e.twins.comparison import by_request, relative
from proof.e2e.twins.twin import Given, Roundings
from proof.e2e.twins.v41_draft_twin import V41DraftTwin

PARTS = ("attn", "ffn")
Context = dict[str, dict[int, torch.Tensor]]
"""The states of each position, by request."""


@dataclass
class Pair:
    """What an engine gave, and what it should have, over the blocks of a run."""

    ours: list[torch.Tensor] = field(default_factory=list)
    wanted: list[torch.Tensor] = field(default_factory=list)

    def error(self) -> float:
        return relative(torch.cat(self.ours), torch.cat(self.wanted))


def blocks_of(result: Served) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
    """Each block with its request and context, in the order in which they ran."""
    for block in result.answer["blocks"]:
        known = contexts_of(result, block["after"])
        size = len(block["ids"]) // len(block["requests"])
        for number, request in enumerate(block["requests"]):
            rows = slice(number * size, (number + 1) * size)
            own = {
                name: value[rows]
                for name, value in block.items()
                if isinstance(value, torch.Tensor)
            }
            first = int(own["positions"][0])
            states = [known[request][place] for place in range(first)]
            yield request, torch.stack(states), own


@torch.no_grad()  # type: ignore[untyped-decorator]
def check_draft(result: Served, twin: V41DraftTwin) -> None:
    """Hold each layer of the draft to the bounds of the model's."""
    found: dict[str, Pair] = defaultdict(Pair)

    def note(name: str, ours: torch.Tensor, wanted: torch.Tensor) -> None:
        found[name].ours.append(ours.float())
        found[name].wanted.append(wanted)

    roundings = Roundings.of(result.answer)
    for _, states, block in blocks_of(result):
        tokens = block["ids"].tolist()
        for layer in twin.stages:
            seen = {
                f"{part} {what}": block[f"{layer - twin.depth} {part} {what}"].float()
                for part in PARTS
                for what in ("input", "output")
            }
            core = block[f"{layer - twin.depth} attn core"].float()
            x = seen["attn input"]
            exact = twin.attend(layer, states, x, Given())
            note(f"float32 {layer}", seen["attn output"], exact)
            with twin.rounded(roundings):
                free, behind = Given(), Given(core=core)
                rounded = twin.attend(layer, states, x, free)
                output = twin.attend(layer, states, x, behind)
                experts = twin.feed_forward(layer, seen["ffn input"], tokens)
            assert free.own_core is not None
            note(f"rounded {layer}", seen["attn output"], rounded)
            note(f"core {layer}", core, free.own_core)
            note(f"output {layer}", seen["attn output"], output)
            note(f"experts {layer}", seen["ffn output"], experts)

        def answer(
            part: str, layer: int, x: torch.Tensor, block: Any = block
        ) -> torch.Tensor:
            own = f"{layer - twin.depth} {part}"
            note(f"streams {part} {layer}", block[f"{own} input"], x)
            return block[f"{own} output"].float()

        with twin.rounded(roundings):
            note("streams head", block["output"], twin.block(tokens, answer))
    for request, states_of in contexts_of(result).items():
        wanted = wanted_context(result, twin, request)
        # The text's last token has keys if it was a draft.
        read = max(len(result.texts[request]) - 1, min(len(states_of), len(wanted)))
        ours = torch.stack([states_of[place] for place in range(read)])
        image = torch.tensor(result.texts[request][:read]) == v41.IMAGE
        note(f"context {request}", ours[~image], wanted[:read][~image])
        if image.any():
            note(f"images {request}", ours[image], wanted[:read][image])
    errors = {name: pair.error() for name, pair in found.items()}
    print({name: round(error, 5) for name, error in errors.items()})
    bounds = {
        "float32": PLAIN,
        "rounded": ROUNDED,
        "core": TIGHT,
        "output": TIGHT,
        "experts": EXPERTS,
        "streams": STREAMS,
        "context": STREAMS,
        # What the tower rounds is in them.
        "images": ROUNDED,
    }
    for name, error in errors.items():
        assert error <= bounds[name.split()[0]], (name, error)
    for layer in twin.stages:
        result.note(
            layer,
            ratio=0,
            core=errors[f"core {layer}"],
            output=errors[f"output {layer}"],
            plain=errors[f"float32 {layer}"],
            experts=errors[f"experts {layer}"],
            streams=max(errors[f"streams {part} {layer}"] for part in PARTS),
        )


def contexts_of(result: Served, after: int | None = None) -> Context:
    """What each request's positions have after so many steps, or after all."""
    known: Context = defaultdict(dict)
    for context in result.answer["contexts"][:after]:
        row = 0
        for request, count in context["rows"]:
            for at in range(row, row + count):
                place = int(context["positions"][at])
                if context["stored"][at]:
                    known[request][place] = context["states"][at].float()
            row += count
    return known


def wanted_context(result: Served, twin: V41DraftTwin, request: str) -> torch.Tensor:
    """What the twin makes of a request's sublayers."""
    seen = {part: by_request(result.answer, part) for part in PARTS}
    # The model also read drafts that no text has.
    text = result.texts[request][: len(seen["attn"][request, 0].input)]

    def answer(part: str, layer: int, x: torch.Tensor) -> torch.Tensor:
        return seen[part][request, layer].output[: len(text)]

    with twin.rounded(Roundings.of(result.answer)):
        return twin.contexts(text, answer)
