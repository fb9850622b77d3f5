# SPDX-License-Identifier: Apache-2.0
"""Two engines that one job names, each of one rank or several: the first reads prompts,
the second answers them from the pages that NIXL brings."""

import importlib.util
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from proof.e2e.checkpoints import checkpoint, dspark, mtp
from proof.e2e.running.asked import ENGINE, LONG, Asked, Long, on_ranks
from proof.e2e.running.server import open_port
from proof.e2e.running.serving import IMPORTED, Engines
from stack.base.releases import load

RANKS = {
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "900",
}
"""A rank starts with what the engine's process has imported, and an interpreted step of
several may take minutes on a busy machine."""
LIMIT = 3600.0
"""Seconds for all prompts of a pair."""


class Wide(Long):
    """For eight ranks."""

    size = replace(mtp.THREE_LAYERS, length=Long.size.length)


@dataclass(frozen=True)
class Pair:
    """The engines, and what they are asked one after the other."""

    name: str
    buffers: str
    """Where NIXL reads and writes: `xpu` or `cpu`."""
    asked: tuple[Asked, ...]
    speculation: tuple[tuple[str, Any], ...] = ()
    ranks: tuple[int, int] = (1, 1)
    """The tensor-parallel ranks of the one that reads, and of the other."""

    def rounds_alike(self, asked: Asked) -> bool:
        """Whether the receiver computes a prompt's last token in a step like the
        sender's. With drafts a step is padded to their number if a request begins with
        its last token: a receiver's always, a sender's behind a prefix that it knows.
        """
        alone = asked.length - asked.sender_knows == 1
        return len(set(self.ranks)) == 1 and (alone or not self.speculation)

    def serve(self, engines: Engines, release: str) -> list[dict[str, Any]]:
        """What `transfer.py` gives of each prompt.

        Raises:
            EngineStopped: an engine ended with an error.
        """
        reading, answering = map(on_ranks, self.ranks)
        drafts = dict(self.speculation)
        name = LONG
        writer: checkpoint.Writer = Long(0)
        if drafts.get("method") == "dspark":
            name, writer = f"{LONG}, DSpark", dspark.DSpark(0, {}, Long.size)
        elif max(self.ranks) > Long.size.groups:
            name, writer = f"{LONG}, wide", Wide(0)
        engines.add_checkpoint(name, writer)
        more = {"speculative_config": drafts} if drafts else {}
        order = engines.work / f"{release}-{self.name}.json"
        order.write_text(
            json.dumps(
                {
                    "model": str(engines.written(name)[0]),
                    "engine": {**ENGINE, **more},
                    "kv_producer": reading,
                    "kv_consumer": answering,
                    "transfer": {
                        "kv_connector": "NixlConnector",
                        "kv_buffer_device": self.buffers,
                    },
                    "splits_keys": False,
                    "packages": [str(packages())],
                    "sender_environment": side_channel() | RANKS,
                    "receiver_environment": side_channel() | RANKS,
                    "prompts": [a.order(n) for n, a in enumerate(self.asked)],
                }
            )
        )
        answer = order.with_suffix(".answer")
        pinned = load(engines.project)[release]
        words = ("proof.e2e.inside.transfer", str(order), str(answer))
        engines.run(pinned, True, words, IMPORTED, LIMIT)
        found: list[dict[str, Any]] = json.loads(answer.read_text())
        return found


def packages() -> Path:
    """The folder with NIXL.

    Raises:
        RuntimeError: there is none.
    """
    found = importlib.util.find_spec("nixl")
    if found is None or found.origin is None:
        raise RuntimeError("there is no nixl: `tox -e hosts` installs it")
    return Path(found.origin).parents[1]


def side_channel() -> dict[str, str]:
    """Where an engine and its ranks listen: on this machine alone."""
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(open_port()),
        "UCX_TLS": "tcp",
        "UCX_NET_DEVICES": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
    }
