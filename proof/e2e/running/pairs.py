# SPDX-License-Identifier: Apache-2.0
"""Two engines that one job names: the first reads prompts, the second answers them from
the pages that NIXL brings."""

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proof.e2e.running.asked import ENGINE, LONG, Asked, Long
from proof.e2e.running.server import open_port
from proof.e2e.running.serving import IMPORTED, Engines
from stack.base.releases import load


@dataclass(frozen=True)
class Pair:
    """The engines, and what they are asked one after the other."""

    name: str
    buffers: str
    """Where NIXL reads and writes: `xpu` or `cpu`."""
    asked: tuple[Asked, ...]
    engine: tuple[tuple[str, Any], ...] = ()

    def serve(self, engines: Engines, release: str) -> list[dict[str, Any]]:
        """What `transfer.py` gives of each prompt.

        Raises:
            EngineStopped: an engine ended with an error.
        """
        engines.add_checkpoint(LONG, Long(0))
        order = engines.work / f"{release}-{self.name}.json"
        order.write_text(
            json.dumps(
                {
                    "model": str(engines.written(LONG)[0]),
                    "engine": {**ENGINE, **dict(self.engine)},
                    "transfer": {
                        "kv_connector": "NixlConnector",
                        "kv_buffer_device": self.buffers,
                    },
                    "splits_keys": False,
                    "packages": [str(packages())],
                    "sender_environment": side_channel(),
                    "receiver_environment": side_channel(),
                    "prompts": [a.order(n) for n, a in enumerate(self.asked)],
                }
            )
        )
        answer = order.with_suffix(".answer")
        pinned = load(engines.project)[release]
        words = ("proof.e2e.inside.transfer", str(order), str(answer))
        engines.run(pinned, True, words, IMPORTED)
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
    """Where an engine listens: on this machine alone."""
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(open_port()),
        "UCX_TLS": "tcp",
        "UCX_NET_DEVICES": "lo",
    }
