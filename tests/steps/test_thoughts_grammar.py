# SPDX-License-Identifier: Apache-2.0
"""A grammar holds from the end of the thoughts on, wherever among the drafts it is.

vLLM's scheduler, its grammars and the model's reasoning parser run; what stands for the
model answers by a table, and samples greedily among the tokens that the grammar allows.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import layout, model_configs

PAGE = 256
BEGIN, END, THINK, THOUGHT = "<s>", "</s>", "<think>", "</think>"
WORDS = (BEGIN, END, THINK, THOUGHT, *'abxyz{}"012: ')
PROMPT = (BEGIN, THINK)
DRAFTS = 3
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
GRAMMARS = {"regex": "[ab]{4}", "json": SCHEMA}

Draft = Callable[[list[int]], list[int]]
"""Three tokens behind the text so far."""


def write_tokenizer(folder: Path) -> None:
    model = {
        "type": "WordLevel",
        "vocab": {word: number for number, word in enumerate(WORDS)},
        "unk_token": END,
    }
    written = {"version": "1.0", "model": model, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(written))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The configuration of a server with drafts."""
    registry = layout.module("vllm.model_executor.models.registry")
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())
    write_tokenizer(tmp_path)
    options = {
        "dtype": "bfloat16",
        "block_size": PAGE,
        "kv_cache_dtype": "fp8",
        "skip_tokenizer_init": False,
        "reasoning_parser": "deepseek_v4",
        "speculative_config": {"method": "mtp", "num_speculative_tokens": DRAFTS},
    }
    made = model_configs.engine_config(tmp_path, {"eos_token_id": 1}, **options)
    made.structured_outputs_config.reasoning_parser = "deepseek_v4"
    made.structured_outputs_config.disable_any_whitespace = True
    made.cache_config.num_gpu_blocks = 64
    return made


def scheduler_of(config: Any) -> Any:
    interface = layout.module("vllm.v1.kv_cache_interface")
    heads = {"num_kv_heads": 1, "head_size": 512, "dtype": torch.uint8}
    spec = interface.MLAAttentionSpec(block_size=PAGE, **heads)
    return layout.module("vllm.v1.core.sched.scheduler").Scheduler(
        config,
        interface.KVCacheConfig(
            num_blocks=64,
            kv_cache_tensors=[],
            kv_cache_groups=[interface.KVCacheGroupSpec(["pages"], spec)],
        ),
        layout.module("vllm.v1.structured_output").StructuredOutputManager(config),
        block_size=PAGE,
        hash_block_size=PAGE,
    )


def request(kind: str, grammar: object) -> Any:
    parameters = layout.module("vllm.sampling_params")
    rule = parameters.StructuredOutputsParams(**{kind: grammar})
    rule._backend = "xgrammar"
    sampling = parameters.SamplingParams(
        temperature=0.0, max_tokens=24, structured_outputs=rule
    )
    sampling.update_from_generation_config({}, WORDS.index(END))
    given = {
        "request_id": "one",
        "prompt_token_ids": [WORDS.index(word) for word in PROMPT],
        "sampling_params": sampling,
        "pooling_params": None,
        "reasoning_parser_kwargs": {"chat_template_kwargs": {"thinking": True}},
    }
    return layout.module("vllm.v1.request").Request(**given)


def allowed(row: Any) -> list[int]:
    """The tokens whose bits are set."""
    return [t for t in range(len(WORDS)) if int(row[t // 32]) >> (t % 32) & 1]


def answer(config: Any, kind: str, grammar: object, thoughts: str, draft: Draft) -> str:
    """What the model says behind its thoughts, which it ends by itself; then it would
    go on with `z`, and where that is not allowed takes the first allowed token of those
    that are in the answer."""
    wanted = [WORDS.index(word) for word in (*thoughts, THOUGHT)]
    scheduler = scheduler_of(config)
    asked = request(kind, grammar)
    scheduler.structured_output_manager.grammar_init(asked)
    # A thread compiles it.
    asked.structured_output_request._grammar.result()
    scheduler.add_request(asked)
    outputs = layout.module("vllm.v1.outputs")

    def sampled(place: int, row: Any) -> int:
        best = wanted[place] if place < len(wanted) else WORDS.index("z")
        found = allowed(row)
        return best if best in found else max(found)

    new: list[int] = []
    while not asked.is_finished():
        step = scheduler.schedule()
        rows = scheduler.get_grammar_bitmask(step).grammar_bitmask
        found: list[int] = []
        for row, token in zip(
            rows, [*step.scheduled_spec_decode_tokens.get("one", []), None], strict=True
        ):
            found.append(sampled(len(new) + len(found), row))
            if found[-1] != token:
                break
        new += found
        made = outputs.ModelRunnerOutput(
            req_ids=["one"], req_id_to_index={"one": 0}, sampled_token_ids=[found]
        )
        scheduler.update_from_output(step, made)
        guess = outputs.DraftTokenIds(["one"], [draft(new)])
        scheduler.update_draft_token_ids(guess)
    words = [WORDS[token] for token in asked.output_token_ids]
    text = "".join(words[words.index(THOUGHT) + 1 :])
    return text.removesuffix(END)


def nothing(_: list[int]) -> list[int]:
    return []


def text_of(*words: str) -> Draft:
    """A draft that knows how the text goes on, up to the end of `words`."""
    known = [WORDS.index(word) for word in words]
    known += [WORDS.index("z")] * DRAFTS
    return lambda new: known[len(new) :][:DRAFTS]


THOUGHTS = [
    *("x", "xy", "xyx", "xyxyx"),
    # They end with a step's last token, which no draft is.
    pytest.param("xyxy", marks=pytest.mark.unchanged),
]
kinds = pytest.mark.parametrize("kind", GRAMMARS)
thoughts = pytest.mark.parametrize("thoughts", THOUGHTS)


@kinds
@thoughts
def test_drafts_that_know_the_answer(config: Any, kind: str, thoughts: str) -> None:
    alone = answer(config, kind, GRAMMARS[kind], thoughts, nothing)
    knowing = text_of(*thoughts, THOUGHT, *alone, END)
    found = answer(config, kind, GRAMMARS[kind], thoughts, knowing)
    assert found == alone, f"with drafts the answer is {found!r}, without {alone!r}"


@kinds
@thoughts
def test_drafts_of_what_is_not_allowed(config: Any, kind: str, thoughts: str) -> None:
    alone = answer(config, kind, GRAMMARS[kind], thoughts, nothing)
    guessing = text_of(*thoughts, THOUGHT, *"zzzzzzzzzzzz")
    found = answer(config, kind, GRAMMARS[kind], thoughts, guessing)
    assert found == alone, f"with drafts the answer is {found!r}, without {alone!r}"


@pytest.mark.unchanged
@kinds
def test_without_drafts(config: Any, kind: str) -> None:
    found = answer(config, kind, GRAMMARS[kind], "xyx", nothing)
    if kind == "json":
        assert json.loads(found) in ({"a": 1}, {"a": 2})
    else:
        assert len(found) == 4 and set(found) <= set("ab")
