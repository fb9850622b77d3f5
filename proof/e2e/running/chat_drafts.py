# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that chats with a draft model that knows what follows a token, and a
server of it: what is asked of a server without drafts is asked of it, too."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from proof.e2e.checkpoints import dspark, mtp
from proof.e2e.checkpoints.chat import ChatWriter
from proof.e2e.running.server import Server
from proof.e2e.running.serving import Engines
from stack.base.releases import load

ALONE, MTP, DSPARK = "alone", "MTP", "DSpark"
DRAFTING: dict[str, dict[str, Any]] = {
    MTP: {"method": "mtp", "num_speculative_tokens": 3},
    DSPARK: {"method": "dspark", "num_speculative_tokens": dspark.BLOCK},
}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


class MtpChat(mtp.Mtp, ChatWriter):
    """Knows `successors` alone: more tokens than the hidden size has no matrix for."""

    def __init__(self, site: Path, successors: Mapping[int, int]) -> None:
        ChatWriter.__init__(self, site)
        self._successors = successors

    def says(self) -> dict[int, int]:
        return dict(self._successors)


class DSparkChat(dspark.DSpark, ChatWriter):
    """The same with DSpark's draft."""

    def __init__(self, site: Path, successors: Mapping[int, int]) -> None:
        ChatWriter.__init__(self, site)
        self._successors = successors

    def described(self) -> dict[str, Any]:
        return ChatWriter.described(self) | dspark.DSpark.described(self)


WRITERS: dict[str, Callable[[Path, Mapping[int, int]], ChatWriter]] = {
    MTP: MtpChat,
    DSPARK: DSparkChat,
}


def asked_of(*kinds: str) -> pytest.MarkDecorator:
    """Asks servers of these kinds, of all three with `--full`: without drafts and with
    MTP if none is named. One is enough where all pass or fail alike."""
    always = kinds or (ALONE, MTP)
    return pytest.mark.parametrize(
        "asked",
        [
            pytest.param(kind, marks=[] if kind in always else [pytest.mark.full])
            for kind in (ALONE, MTP, DSPARK)
        ],
        indirect=True,
    )


@contextmanager
def server_with(
    engines: Engines, release: str, drafts: str, texts: list[list[int]]
) -> Iterator[Server]:
    """A server with `drafts` that know the tokens of `texts`, up.

    Raises:
        AssertionError: at the end, if no draft was accepted.
    """
    site = engines.installed(load(engines.project)[release], patched=True)
    name = f"chat-{release}-{drafts}"
    engines.add_checkpoint(name, WRITERS[drafts](site, dspark.following(texts)))
    flag = json.dumps(DRAFTING[drafts])
    with Server(
        engines, release, "--speculative-config", flag, checkpoint=name
    ) as started:
        yield started.wait()
        assert started.metric(ACCEPTED), "no draft was accepted"
