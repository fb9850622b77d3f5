# SPDX-License-Identifier: Apache-2.0
"""One server reads prompts and another answers, over NIXL and the host's buffers."""

import importlib.util
import json
import random
from typing import Any

import pytest

from e2e.chat import SPECIAL
from e2e.server import MODEL, Server, open_port
from e2e.serving import Engines

pytestmark = [pytest.mark.newest, pytest.mark.full]

LENGTHS = (20, 300)
"""Tokens of a prompt within a page, and of one that fills a page."""
NIXL = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
}
HITS = "vllm:external_prefix_cache_hits_total"


def prompts() -> list[list[int]]:
    chosen = random.Random(0)
    return [[chosen.randrange(len(SPECIAL), 900) for _ in range(n)] for n in LENGTHS]


def ask(server: Server, prompt: list[int], new: int, **transfer: Any) -> Any:
    more = {"kv_transfer_params": transfer} if transfer else {}
    return server.client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=new,
        temperature=0.0,
        extra_body={"ignore_eos": True, "return_token_ids": True, **more},
    )


def apart(reads: Server, answers: Server, prompt: list[int], new: int) -> list[int]:
    """As a proxy asks: the one for the prompt's pages, then the other with where they
    are."""
    read = ask(reads, prompt, 1, do_remote_decode=True, do_remote_prefill=False)
    where = read.kv_transfer_params
    tokens: list[int] = ask(answers, prompt, new, **where).choices[0].token_ids
    return tokens


@pytest.mark.shows("prefill and decode apart, by NIXL", "equal")
def test_the_one_reads_and_the_other_answers(engines: Engines, release: str) -> None:
    if importlib.util.find_spec("nixl") is None:
        pytest.skip("there is no nixl: run this by `tox -e hosts`")

    def server() -> Server:
        return Server(
            engines,
            release,
            "--kv-transfer-config",
            json.dumps(NIXL),
            VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
            VLLM_NIXL_SIDE_CHANNEL_PORT=str(open_port()),
            UCX_TLS="tcp",
        )

    with server() as reads, server() as answers:
        reads.wait()
        answers.wait()
        for prompt in prompts():
            before = answers.metric(HITS)
            tokens = apart(reads, answers, prompt, 6)
            whole = ask(reads, prompt, 6).choices[0].token_ids
            assert tokens == whole
            assert answers.metric(HITS) > before
