# SPDX-License-Identifier: Apache-2.0
"""What somebody asks for: a model, devices, and the load that they must carry."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lab.memory import DEVICES, Device
from lab.planner.checkpoints import Checkpoint
from stack.core.errors import UsageError

SHARE = 0.9
"""Of a device's memory, what vLLM may use unless it is told."""
CONTEXT, CONCURRENCY = 131_072, 16
"""The load unless one is named: tokens of a request, and requests at a time."""
ACTIVATIONS = 3 << 30
"""Bytes set aside for activations and workspaces at least, which nobody has measured on
an Intel GPU."""
BESIDE_WORKSPACES = 2 << 30
"""Bytes of activations beside the workspaces, whose size is known, where both are more:
a long context's keys that prefill gathers."""
LINK = 28
"""Gigabytes per second from the host to a device, unless a plan is told: PCIe 5.0 with
eight lanes, as a B60 has; sixteen move about 50."""
CHUNKS = (8192, 4096, 2048)
"""Tokens of a prompt that a step reads at most: the largest with which all fits."""


@dataclass(frozen=True)
class Asked:
    """A plan that is wanted.

    Attributes:
        replicas: data-parallel ones, among which the requests are spread.
        expert_parallel: whether ranks hold whole experts.
        share: of a device's memory, what vLLM may use.
        speculation: vLLM's `--speculative-config`; empty for no drafts.
        images: of a prompt at most.
        host: GiB of memory of the host that experts may take; 0 to keep all on devices.
        link: gigabytes per second from the host to a device.

    Raises:
        UsageError: a value does not go with the others.
    """

    checkpoint: Checkpoint
    device: Device
    count: int
    context: int
    requests: int
    replicas: int = 1
    expert_parallel: bool = False
    share: float = SHARE
    speculation: Mapping[str, Any] = field(default_factory=dict)
    images: int = 0
    host: int = 0
    link: int = LINK

    def __post_init__(self) -> None:
        if self.count % self.replicas:
            raise UsageError(
                f"{self.count} devices cannot be {self.replicas} equal replicas",
                hint="--data-parallel-size must divide --count",
            )
        if self.context > self.checkpoint.length:
            raise UsageError(
                f"--context {self.context} is beyond {self.checkpoint.label} itself:"
                f" its contexts end at {self.checkpoint.length} tokens"
                " (max_position_embeddings), and more devices change nothing",
                hint=f"the same with --context {self.checkpoint.length} or less",
            )
        if not 0 < self.share <= 1:
            raise UsageError(
                f"--gpu-memory-utilization {self.share} is no share of a device's"
                " memory",
                hint=f"more than 0 and at most 1, such as {SHARE}",
            )
        if self.images and not self.checkpoint.architecture.images:
            raise UsageError(
                f"{self.checkpoint.label} takes no images",
                hint="--model vision or v4.1, or leave --limit-mm-per-prompt out",
            )

    @property
    def of_a_replica(self) -> int:
        """Requests that one replica must carry."""
        return -(-self.requests // self.replicas)

    def usable(self) -> float:
        """Bytes of a device that vLLM may use."""
        return float(self.device.memory * self.share * (1 << 30))


def speculation(text: str) -> dict[str, Any]:
    """vLLM's `--speculative-config`, such as
    `{"method": "mtp", "num_speculative_tokens": 1}`.

    Raises:
        UsageError: it is no object with a method and a number of tokens.
    """
    found = _object("--speculative-config", text, SPECULATION)
    count = found.get("num_speculative_tokens")
    if not isinstance(found.get("method"), str) or type(count) is not int or count < 1:
        raise UsageError(
            f"--speculative-config {text} has no method and number of tokens",
            hint=f"such as --speculative-config '{SPECULATION}'",
        )
    return found


def images(text: str) -> int:
    """vLLM's `--limit-mm-per-prompt`, such as `{"image": 4}`.

    Raises:
        UsageError: it is something else.
    """
    found = _object("--limit-mm-per-prompt", text, IMAGES)
    count = found.get("image")
    if set(found) != {"image"} or type(count) is not int or count < 0:
        raise UsageError(
            f"--limit-mm-per-prompt {text} does not say how many images a prompt has",
            hint=f"such as --limit-mm-per-prompt '{IMAGES}'",
        )
    return count


SPECULATION = '{"method": "mtp", "num_speculative_tokens": 1}'
IMAGES = '{"image": 4}'


def _object(option: str, text: str, example: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UsageError(
            f"{option} {text} is no JSON object", hint=f"such as {option} '{example}'"
        )
    return found


def device(name: str) -> Device:
    """The device called `name`, such as b60.

    Raises:
        UsageError: there is none.
    """
    known = {short(one): one for one in DEVICES}
    wanted = re.sub(r"[^a-z0-9]", "", name.lower())
    if wanted not in known:
        raise UsageError(
            f"no figures of a device {name!r} are known",
            detail=[f"known: {', '.join(known)}"],
            hint="name one of them; docs/deploying.md, Devices",
        )
    return known[wanted]


def short(one: Device) -> str:
    """What a device is called on the command line."""
    plain = re.sub(r"[^a-z0-9]", "", one.name.partition(",")[0].lower())
    return plain.removeprefix("arcpro")
