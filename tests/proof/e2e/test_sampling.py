# SPDX-License-Identifier: Apache-2.0
"""Random sampling, priorities, an aborted request and one that is too long.

One engine serves all of it. Drawn tokens are counted and held against the distribution
that the request's parameters make of the logits that the engine computed, which
themselves are held against Hugging Face's. Each test of counts fails a right sampler
once in a million runs (`chance.RATE`).
"""

import pytest
import torch
from test_engine import MIXED

from proof.e2e.checkpoints import checkpoint
from proof.e2e.judging.chance import RATE, Draw, draw, excess, p_value
from proof.e2e.judging.checks import MARGIN, check_logits, leads_of
from proof.e2e.running.serving import Engines, Job, Prompt, Served
from proof.e2e.twins.comparison import logits_by_request
from proof.e2e.twins.twin import Twin

pytestmark = pytest.mark.newest

KINDS: dict[str, tuple[tuple[str, float], ...]] = {
    "as it is": (("temperature", 1.0),),
    "best 10": (("temperature", 0.7), ("top_k", 10)),
    "best 80 %": (("temperature", 1.0), ("top_p", 0.8)),
    "both": (("temperature", 1.5), ("top_k", 20), ("top_p", 0.9)),
}
EACH = 8
NEW = 4
LOGPROBS = 3
LETTERS = "abcdef"
WORD = 4
SEED = 1000


def crowd(seeded: bool) -> tuple[Prompt, ...]:
    """EACH requests of each kind; of each kind the first two ask the same."""
    asked = []
    for first, kind in enumerate(KINDS.values()):
        for number in range(EACH):
            own = SEED + first * EACH + max(1, number)
            drawing = (*kind, ("logprobs", LOGPROBS), ("seed", own))
            asked.append(
                Prompt(1, NEW, own, sampling=drawing if seeded else drawing[:-1])
            )
    return tuple(asked)


def spelled(number: int) -> Prompt:
    rule = f"[{LETTERS}]{{{WORD}}}"
    sampling = (("temperature", 1.0), ("regex", rule), ("ignore_eos", False))
    return Prompt(1, WORD + 2, seed=50 + number, sampling=(*sampling, ("seed", number)))


SEEDED, FREE = crowd(seeded=True), crowd(seeded=False)
SPELLED = tuple(spelled(number) for number in range(8))
RANKED = tuple(Prompt(25, 1, seed=60 + p, priority=p) for p in (5, 0, 2))
"""No two of them fit into one step whole."""
ABORTED = Prompt(9, 12, seed=4, abort_after=2)
INTERRUPTED = (ABORTED, *MIXED.waves[0][1:])
TOO_LONG = Prompt(checkpoint.MAX_LENGTH + 1, 1)
SAMPLING = Job(
    "sampling",
    (SEEDED, FREE, SPELLED, RANKED, INTERRUPTED),
    (
        ("skip_tokenizer_init", False),
        ("scheduling_policy", "priority"),
        ("structured_outputs_config", {"backend": "xgrammar"}),
        ("max_num_seqs", len(SEEDED)),
        ("kv_cache_memory_bytes", 64 << 20),
    ),
    refused=(TOO_LONG,),
    splits_keys=False,
)


def requests_of(served: Served, wave: tuple[Prompt, ...]) -> list[tuple[str, Prompt]]:
    """The engine's names of a wave's requests."""
    names = {int(name.partition("-")[0]): name for name in served.texts}
    start = next(
        sum(map(len, SAMPLING.waves[:number]))
        for number, other in enumerate(SAMPLING.waves)
        if other is wave
    )
    return [(names[start + place], prompt) for place, prompt in enumerate(wave)]


def draws_of(
    served: Served, wave: tuple[Prompt, ...], among: str = ""
) -> dict[tuple[tuple[str, float], ...], list[Draw]]:
    """Every token that was drawn for a wave, by the kind of request. Of requests that
    ask the same with the same seed only one is counted."""
    logits = logits_by_request(served.answer)
    found: dict[tuple[tuple[str, float], ...], list[Draw]] = {}
    asked: set[Prompt] = set()
    for name, prompt in requests_of(served, wave):
        if prompt in asked and "seed" in dict(prompt.sampling):
            continue
        asked.add(prompt)
        text = served.texts[name]
        kind = tuple(x for x in prompt.sampling if x[0] in dict(KINDS["both"]))
        for position in range(len(prompt.tokens) - 1, len(text) - 1):
            choice = [ord(letter) for letter in among]
            if among and position + 1 == len(prompt.tokens) + WORD:
                choice = [1]
            drawn = draw(text[position + 1], logits[name][position], dict(kind), choice)
            found.setdefault(kind, []).append(drawn)
    return found


def check_counts(draws: dict[tuple[tuple[str, float], ...], list[Draw]]) -> None:
    for kind, found in draws.items():
        outside = [one.token for one in found if one.shares[one.token] == 0]
        assert not outside, f"{dict(kind)} drew what it leaves out: {outside}"
    counted = [one for found in draws.values() for one in found if not one.edge]
    for by_rank in (False, True):
        p = p_value(counted, by_rank)
        print(f"{len(counted)} draws by {'rank' if by_rank else 'token'}: p = {p:.3g}")
        assert p >= RATE, (by_rank, p)
    rare = excess(counted)
    assert rare >= RATE, rare


@pytest.mark.serves(SAMPLING)
@pytest.mark.parametrize("wave", [SEEDED, FREE], ids=["seeded", "free"])
def test_counts(engines: Engines, release: str, wave: tuple[Prompt, ...]) -> None:
    result = engines.serve(release, SAMPLING)
    draws = draws_of(result, wave)
    assert len(draws) == len(KINDS)
    check_counts(draws)


@pytest.mark.serves(SAMPLING)
def test_a_grammar(engines: Engines, release: str) -> None:
    """Each text is a word of the rule, ended; the letters are drawn as the model
    says."""
    result = engines.serve(release, SAMPLING)
    for name, prompt in requests_of(result, SPELLED):
        *word, end = result.texts[name][len(prompt.tokens) :]
        assert len(word) == WORD and end == 1, (name, word, end)
    check_counts(draws_of(result, SPELLED, LETTERS))


@pytest.mark.serves(SAMPLING)
def test_seeds(engines: Engines, release: str) -> None:
    """Equal seeds draw equal tokens; other seeds, or none, draw others."""
    result = engines.serve(release, SAMPLING)
    texts = [text for wave in result.answer["tokens"][:2] for text in wave]
    seeded, free = texts[: len(SEEDED)], texts[len(SEEDED) :]
    for first in range(0, len(SEEDED), EACH):
        assert seeded[first] == seeded[first + 1], seeded[first : first + 2]
    assert len(set(map(tuple, seeded))) == len(KINDS) * (EACH - 1)
    pairs = range(0, len(FREE), EACH)
    assert any(free[first] != free[first + 1] for first in pairs), "no chance"


@pytest.mark.serves(SAMPLING)
def test_logprobs(engines: Engines, twin: Twin, release: str) -> None:
    """The token's and the best ones', of the logits before temperature and choice."""
    result = engines.serve(release, SAMPLING)
    logits = logits_by_request(result.answer)
    given = result.answer["logprobs"]
    compared = 0
    for number, wave in enumerate((SEEDED, FREE)):
        for place, (name, prompt) in enumerate(requests_of(result, wave)):
            for step, found in enumerate(given[number][place]):
                position = len(prompt.tokens) - 1 + step
                values = logits[name][position]
                token = result.texts[name][position + 1]
                wanted = values.log_softmax(0)
                assert token in found
                best = values.topk(LOGPROBS).values
                for other, (logprob, rank) in found.items():
                    assert abs(logprob - float(wanted[other])) < 1e-4
                    ahead = int((values > values[other]).sum())
                    equal = int((values == values[other]).sum())
                    assert ahead < rank <= ahead + equal
                shown = torch.tensor([float(values[other]) for other in found])
                assert all((shown == value).any() for value in best)
                compared += 1
    assert compared == NEW * len(SEEDED + FREE)
    check_logits(result, twin)


@pytest.mark.serves(SAMPLING)
def test_priorities(engines: Engines, release: str) -> None:
    """The lower number is read first, whatever came first."""
    result = engines.serve(release, SAMPLING)
    numbers = {name: p.priority for name, p in requests_of(result, RANKED)}
    read = dict.fromkeys(numbers.values(), 0)
    done: list[int] = []
    for record in result.answer["records"]:
        if (record["layer"], record["part"]) != (0, "attn"):
            continue
        for name, count in record["rows"]:
            if name in numbers:
                read[numbers[name]] += count
        ended = {p for p, count in read.items() if count == RANKED[0].length}
        done += sorted(ended.difference(done))
    assert done == sorted(numbers.values())


@pytest.mark.serves(SAMPLING, MIXED)
def test_an_aborted_request(engines: Engines, release: str) -> None:
    """It is computed no further, and the others' tokens are those without it."""
    result = engines.serve(release, SAMPLING)
    alone = engines.serve(release, MIXED)
    aborted, *others = result.answer["tokens"][-1]
    assert len(aborted) == ABORTED.abort_after
    (name, _), *_ = requests_of(result, INTERRUPTED)
    computed = sum(
        count
        for record in result.answer["records"]
        if (record["layer"], record["part"]) == (0, "attn")
        for row, count in record["rows"]
        if row == name
    )
    # The step that is under way when the engine hears of it may be computed.
    assert computed <= ABORTED.length + len(aborted), computed
    leads = leads_of(alone)
    for prompt, tokens, wanted in zip(
        INTERRUPTED[1:], others, alone.new_tokens()[1:], strict=True
    ):
        assert len(tokens) == prompt.new
        for place, (token, theirs) in enumerate(zip(tokens, wanted, strict=True)):
            if token != theirs:
                lead = leads[tuple(prompt.tokens + wanted[:place]), ()]
                assert lead <= MARGIN, (prompt, place, token, theirs, lead)
                break


@pytest.mark.serves(SAMPLING)
def test_a_prompt_that_is_too_long(engines: Engines, release: str) -> None:
    """It is refused, and the next request gets its tokens."""
    result = engines.serve(release, SAMPLING)
    (message,) = result.answer["refusals"]
    ((after,),) = result.answer["tokens_after_refusals"]
    assert len(after) == SEEDED[0].new
    print(message)
    assert str(len(TOO_LONG.tokens)) in message, message
    assert str(checkpoint.MAX_LENGTH) in message, message
    assert "max" in message, message
