# SPDX-License-Identifier: Apache-2.0
"""`python -m proof.e2e.inside.lacking JOB RESULT` starts one engine,
and writes down what it says of its checkpoint with one tensor damaged, by model class,
damage and tensor.

JOB is one of `engine.py`. Each model that the engine loads, its draft too, takes the
whole checkpoint first, and then each tensor alone, which tells what parameters that
tensor fills. The check of parts then sees the checkpoint without it, and the loader
each tensor with another shape or type.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from proof.e2e.inside import engine

LOST = "lost"
MISFITS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a row less": lambda tensor: tensor[:-1],
    "a row more": lambda tensor: torch.cat((tensor, tensor[:1])),
    "float64": lambda tensor: tensor.float().double(),
}
"""Damages of one tensor, by name."""
Tensors = dict[str, torch.Tensor]


def without(loader: Any, model: Any, tensors: Tensors, draft: bool) -> dict[str, str]:
    """By tensor that `model` reads, what the check says without it; "" for nothing."""
    from vllm_xpu_dsv4.checkpoint_parts import PartsCheck
    from vllm_xpu_dsv4.checkpoint_tensors import check_tensors

    fills = {
        name: set(
            model.load_weights(
                check_tensors(model.config, [(name, tensor)], of_draft=draft)
            )
        )
        for name, tensor in tensors.items()
    }
    filled = Counter(name for names in fills.values() for name in names)
    found = {}
    for lost, names in fills.items():
        if not names:
            continue
        parts = PartsCheck(loader.local_expert_ids)
        rest = ((name, tensor) for name, tensor in tensors.items() if name != lost)
        for _ in parts.noted(rest):
            pass
        left = {name for name in filled if filled[name] > (name in names)}
        try:
            parts.check(model, left, draft=draft)
        except ValueError as error:
            # Of a layer without its scale the weight is named.
            known = {lost, lost.removesuffix("scale") + "weight", *names}
            found[lost] = str(error) if any(n in str(error) for n in known) else ""
        else:
            found[lost] = ""
    return found


def misfit(
    model: Any,
    tensors: Tensors,
    damage: Callable[[torch.Tensor], torch.Tensor],
    draft: bool,
) -> dict[str, str]:
    """By tensor, what the loader says with that one damaged; "" if it does not name
    the tensor."""
    from vllm_xpu_dsv4.checkpoint_faults import Following
    from vllm_xpu_dsv4.checkpoint_tensors import check_tensors

    found = {}
    for name, tensor in tensors.items():
        found[name] = ""
        following = Following()
        given = following.followed([(name, damage(tensor))])
        try:
            try:
                model.load_weights(check_tensors(model.config, given, of_draft=draft))
            except Exception as error:
                following.blame(error)
                raise
        except Exception as error:
            found[name] = str(error) if name in str(error) else ""
    return found


def main() -> None:
    job, answer = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm_xpu_dsv4.loader import CheckedLoader

    found: dict[str, dict[str, dict[str, str]]] = {}
    whole: Any = CheckedLoader.load_weights

    def load_weights(self: Any, model: Any, config: Any) -> None:
        whole(self, model, config)
        tensors = dict(DefaultModelLoader.get_all_weights(self, config, model))
        draft = config.runner_type == "draft"
        of_model = {LOST: without(self, model, tensors, draft)}
        read = {name: tensors[name] for name in of_model[LOST]}
        for name, damage in MISFITS.items():
            of_model[name] = misfit(model, read, damage, draft)
        found[type(model).__name__] = of_model
        whole(self, model, config)

    CheckedLoader.load_weights = load_weights
    engine.start(job)
    torch.save(found, answer)


if __name__ == "__main__":
    main()
