# SPDX-License-Identifier: Apache-2.0
"""What DSpark's draft of V4.1 computes, written down inside an installed vLLM.

After each step the draft's layers get keys of the step's tokens (the context), and then
see a block of queries of each request: its newest token, and noise.
"""

from collections.abc import Callable
from typing import Any

import torch

NO_BLOCKS = -2
"""Where a rank has no candidate blocks of an indexer: it did not score the row."""
Rows = list[tuple[str, int]]
"""Each request's name and how many tokens it has in a step."""

contexts: list[dict[str, Any]] = []
"""`rows` of a step, their `positions`, the `states` that keys were made of, and which
were `stored`: the rows of rejected drafts are not."""
blocks: list[dict[str, Any]] = []
"""The `requests` of a step, `ids` and `positions` of their queries, what each layer got
and gave, the `output` of the last one, and `after` how many contexts it ran: a step of
which nobody needs a draft has no block."""


def record(draft: Any, rows_of_this_step: Callable[[], Rows]) -> None:
    """Write down what a draft computes; nothing while there are no rows."""
    model = draft.model
    store = model.precompute_and_store_context_kv
    seen: dict[str, torch.Tensor] = {}

    def store_and_keep(states: Any, positions: Any, slots: Any = None) -> None:
        store(states, positions, slots)
        if slots is not None and (rows := rows_of_this_step()):
            kept = {"positions": positions.clone(), "states": states.clone()}
            contexts.append({"rows": rows, "stored": slots[0] >= 0, **kept})

    def of(name: str) -> Callable[..., None]:
        def keep(module: Any, args: Any, kwargs: Any, output: torch.Tensor) -> None:
            x = kwargs.get("hidden_states")
            seen[f"{name} input"] = (args["attn" in name] if x is None else x).clone()
            seen[f"{name} output"] = output.clone()
            if hasattr(module, "kept_core"):
                seen[f"{name} core"] = module.kept_core.clone()

        return keep

    def keep_block(module: Any, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        given = dict(zip(("input_ids", "positions"), args, strict=False)) | kwargs
        if rows := rows_of_this_step():
            requests = [request for request, _ in rows]
            asked = {"ids": given["input_ids"], "positions": given["positions"]}
            kept = {name: value.clone() for name, value in asked.items()}
            kept |= {"output": output.clone()} | seen
            blocks.append({"requests": requests, "after": len(contexts), **kept})
        seen.clear()

    model.precompute_and_store_context_kv = store_and_keep
    for number, layer in enumerate(model.layers):
        for part in ("attn", "ffn"):
            hook = of(f"{number} {part}")
            getattr(layer, part).register_forward_hook(hook, with_kwargs=True)
    model.register_forward_hook(keep_block, with_kwargs=True)
