# SPDX-License-Identifier: Apache-2.0
"""Other models than DeepSeek-V4 start and answer with the patched tree as with the
untouched one: no patched wheel harms another model.

The models have two layers and random weights. Those that decode answer in eager mode,
then capture graphs, whose replays run the step again here, and answer by these: so they
have all that a start does with graphs.
"""

from concurrent.futures import Future
from typing import Any

import pytest

from proof.e2e.running.other_models import MODELS, Model
from proof.e2e.running.serving import Engines

pytestmark = pytest.mark.newest

SHORT = ("hybrid", "images", "encoder")
"""What runs without --full: in these, the most of what steps could touch."""

Answers = dict[str, dict[str, Any]]


def served(engines: Engines, release: str, patched: bool, short: bool) -> Answers:
    """What a tree gives of the models that run by default, or of the others."""
    models = (model for kind, model in MODELS.items() if (kind in SHORT) == short)
    return engines.others(release, patched, tuple(models))


def begin(engines: Engines, release: str, model: Model) -> tuple[Future[Answers], ...]:
    short = model.kind in SHORT
    return tuple(
        engines.begin(served, release, patched, short) for patched in (False, True)
    )


@pytest.mark.begins(start=begin)
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, id=kind, marks=[] if kind in SHORT else [pytest.mark.full])
        for kind, model in MODELS.items()
    ],
)
def test_a_model_answers_as_before(
    engines: Engines, release: str, model: Model
) -> None:
    before, after = (
        found.result()[model.kind] for found in begin(engines, release, model)
    )
    assert "stopped" not in before, before["stopped"]
    assert after == before
    if model.pooling:
        assert len(set(map(tuple, after["embeddings"]))) == len(after["embeddings"])
    else:
        assert after["graphs"] >= 3, "the start captured no graphs"
        # Answers of one token again and again would hide a lot.
        assert all(len({token for token, _ in text}) > 1 for text in after["eager"])
