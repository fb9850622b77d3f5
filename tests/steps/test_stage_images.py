# SPDX-License-Identifier: Apache-2.0
"""Attention of a later pipeline stage gets the spans of images, as the first one's."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.images import block, encoder_cache, handed, state_with

pytestmark = pytest.mark.any_platform
IMAGES = [block(16, 3, 5), block(150, 10, 13)]


def later_stage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its state has seen two requests, of which one has images."""
    state = state_with(folder, monkeypatch, None)
    for number, (name, images) in enumerate((("text", []), ("seen", IMAGES))):
        state.add_request(number, SimpleNamespace(req_id=name, mm_features=images))
    return state


def test_a_later_stage_gets_the_spans_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = encoder_cache(IMAGES)
    first = state_with(tmp_path, monkeypatch, cache)
    wanted = handed(first)
    assert wanted[1]
    got = handed(later_stage(tmp_path, monkeypatch))
    assert got == wanted, f"a later stage gets the spans {got}"


def test_a_request_that_ended_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = later_stage(tmp_path, monkeypatch)
    assert handed(state)[1], "a later stage gets no spans"
    state.remove_request("seen")
    assert handed(state) is None


def test_a_later_stage_lets_go_of_pixels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay in what the engine sent, which a first stage encodes."""
    state = state_with(tmp_path, monkeypatch, None)
    sent = [replace(image, data={"pixel_values": None}) for image in IMAGES]
    state.add_request(0, SimpleNamespace(req_id="seen", mm_features=sent))
    assert handed(state), "a later stage gets no spans"
    assert not any(kept.data for kept in state.mm_features["seen"])
    assert all(image.data for image in sent)


@pytest.mark.unchanged
def test_the_first_stage_asks_its_encoder_cache_on_other_platforms_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has each request, whose images may change while it is served."""
    cache = encoder_cache(IMAGES[:1])
    state = state_with(tmp_path, monkeypatch, cache)
    before = handed(state)
    state.add_request(0, SimpleNamespace(req_id="seen", mm_features=IMAGES))
    assert before[1] and handed(state) == before
    state.remove_request("seen")
    assert "seen" in cache.mm_features, "the runner has its cache forget a request"


@pytest.mark.unchanged
def test_a_later_stage_of_text_gets_none_on_other_platforms_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_with(tmp_path, monkeypatch, None, sees=False)
    state.add_request(0, SimpleNamespace(req_id="text", mm_features=[]))
    assert handed(state) is None


@pytest.mark.unchanged
@pytest.mark.parametrize("stage", ["first", "later"])
def test_other_models_see_images_as_text(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = encoder_cache(IMAGES) if stage == "first" else None
    state = state_with(tmp_path, monkeypatch, cache)
    vars(state.model_config)["is_mm_prefix_lm"] = False
    if stage == "later":
        state.add_request(0, SimpleNamespace(req_id="seen", mm_features=IMAGES))
        assert not getattr(state, "mm_features", {}), "it keeps what nobody reads"
    assert handed(state) is None
