# SPDX-License-Identifier: Apache-2.0
"""What every engine is held to, and the bounds."""

from collections.abc import Callable

import torch

from proof.e2e.pictures import Key, Picture
from proof.e2e.running.serving import Served
from proof.e2e.twins import rounding, tower
from proof.e2e.twins.comparison import (
    Error,
    attention_errors,
    feed_forward_errors,
    logits_by_request,
    relative,
)
from proof.e2e.twins.twin import Reference, Roundings

Logprobs = dict[tuple[int, ...], torch.Tensor]
"""Of all tokens, by the text that they follow."""
TIGHT = 1e-2
OVERLAP = 0.97
ROUNDED = 5e-2
PLAIN = 0.12
EXPERTS = 1.5e-2
MARGIN = 0.2
"""Least lead of the twin's best logit, of a spread of 1, that the engine must see."""
SAME = 0.01
"""How far log-probabilities may lie apart that follow the same text, where pages were
moved and all else is the same. They are equal then; a step of few tokens in place of
many makes 0.04 of it, and a prompt that is read again in place of single tokens 0.10.
"""


def check_attention(result: Served, twin: Reference) -> list[Error]:
    """Hold every attention layer of every request to the bounds."""
    errors = attention_errors(result.answer, twin, Roundings.of(result.answer))
    for error in errors:
        print(error)
    for error in errors:
        assert error.core <= TIGHT, error
        assert error.output <= TIGHT, error
        assert error.rounded <= ROUNDED, error
        assert error.plain <= PLAIN, error
        assert error.overlap is None or error.overlap >= OVERLAP, error
        assert error.blocks is None or error.blocks >= OVERLAP, error
    for error in errors:
        kept = {name: getattr(error, name) for name in ("core", "output", "plain")}
        if error.overlap is not None:
            kept["missed"] = 1 - error.overlap
        result.note(error.layer, ratio=error.ratio, **kept)
    return errors


def check_experts(result: Served, twin: Reference) -> dict[tuple[str, int], float]:
    """Hold the experts of every layer and every request to their bound."""
    roundings = Roundings.of(result.answer)
    errors = feed_forward_errors(result.answer, twin, roundings)
    print(errors)
    assert max(errors.values()) <= EXPERTS, errors
    for (_, layer), error in errors.items():
        result.note(layer, experts=error)
    return errors


def check_tower(
    result: Served,
    weights: dict[str, torch.Tensor],
    rows_of: Callable[[tower.Tower, Picture], torch.Tensor],
) -> None:
    """Each image gives the rows of the float32 tower, and those of the same tower that
    rounds to bfloat16."""
    for picture in [p for prompt in result.job.prompts for p in prompt.images]:
        wanted = tower.patches_of(picture)
        (rows,) = (
            entry["rows"]
            for entry in result.answer["encoded"]
            if entry["patches"].flatten(1).shape == wanted.shape
            and entry["patches"].flatten(1).equal(wanted)
        )
        exact, rounded = (
            relative(rows, rows_of(tower.Tower(weights, kept), picture))
            for kept in (lambda x: x, rounding.bf16)
        )
        print(f"tower: {picture.grid} tokens, {exact:.4f}, {rounded:.4f} if rounded")
        assert exact <= PLAIN and rounded <= TIGHT, picture


def check_logits(result: Served, twin: Reference) -> None:
    """Logits of the whole model, and the token wherever the twin is sure of it."""
    answer, sure, all_ = result.answer, 0, 0
    ours, plain, rounded = [], [], []
    for request, found in logits_by_request(answer).items():
        text = result.texts[request]
        exact = twin.logits(text)
        with twin.rounded(Roundings.of(answer)):
            quantized = twin.logits(text)
        for position, values in found.items():
            if position + 1 >= len(text):
                continue
            ours.append(values)
            plain.append(exact[position])
            rounded.append(quantized[position])
            best = quantized[position].topk(2)
            all_ += 1
            if best.values[0] - best.values[1] > MARGIN:
                sure += 1
                if is_greedy(result, request, position):
                    assert best.indices[0] == text[position + 1], (request, position)
    figures = [relative(torch.stack(ours), torch.stack(x)) for x in (plain, rounded)]
    print(f"logits: {figures[0]:.4f} of float32, {figures[1]:.4f} of the rounding twin")
    print(f"greedy tokens: {sure} of {all_} positions decided by more than {MARGIN}")
    assert sure, "the twin is sure of no token"
    assert max(figures) <= PLAIN, figures
    result.note("logits", plain=figures[0])


def is_greedy(result: Served, request: str, position: int) -> bool:
    """Whether the token after `position` is the engine's best, not the prompt's."""
    number = int(request.partition("-")[0])
    prompt = result.job.prompts[number]
    return not prompt.sampling and position + 1 >= len(result.read[number])


def check_same_tokens(result: Served, other: Served) -> None:
    """Requests with equal prompts get equal greedy tokens from two engines, up to a
    token of which `other` was not sure."""
    others = dict(zip(_asked(other), other.new_tokens(), strict=True))
    leads = leads_of(other)
    compared = 0
    for asked, tokens in zip(_asked(result), result.new_tokens(), strict=True):
        wanted = others[asked][: len(tokens)]
        prompt, images = asked
        for place, (token, theirs) in enumerate(zip(tokens, wanted, strict=True)):
            lead = leads[(*prompt, *wanted[:place]), images]
            compared += 1
            if token != theirs:
                assert lead <= MARGIN, (prompt, place, token, theirs, lead)
                break
    assert compared > len(result.job.prompts), "no token after the first is the same"


def _asked(result: Served) -> list[Key]:
    """Each prompt's tokens and images."""
    return [
        (tuple(read), prompt.images)
        for prompt, read in zip(result.job.prompts, result.read, strict=True)
    ]


def check_same_logprobs(ours: Logprobs, theirs: Logprobs) -> None:
    """Behind the same text all tokens have the same log-probabilities, up to `SAME`;
    both as `logprobs_of` gives them."""
    apart = {
        text: float((ours[text] - theirs[text]).abs().max())
        for text in ours.keys() & theirs.keys()
    }
    assert apart, "no text is the same"
    worst = max(apart, key=lambda text: apart[text])
    print(f"log-probabilities of {len(apart)} texts are {apart[worst]:.4f} apart")
    assert apart[worst] <= SAME, (
        f"behind {len(worst)} tokens log-probabilities are {apart[worst]:.3f} apart"
    )


def logprobs_of(result: Served, *numbers: int) -> Logprobs:
    """What requests of these numbers, or all, sampled from; of equal texts, what the
    last one did."""
    return {
        tuple(result.texts[request][: position + 1]): values.log_softmax(0)
        for request, logits in logits_by_request(result.answer).items()
        if not numbers or int(request.partition("-")[0]) in numbers
        for position, values in logits.items()
    }


def leads_of(result: Served) -> dict[Key, float]:
    """How far the best logit was ahead, by the tokens and images it followed."""
    found = {}
    for request, logits in logits_by_request(result.answer).items():
        text = result.texts[request]
        for position, values in logits.items():
            first, second = values.topk(2).values.tolist()
            found[tuple(text[: position + 1]), text.images] = first - second
    return found
