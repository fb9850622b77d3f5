# SPDX-License-Identifier: Apache-2.0
"""A layer without auxiliary streams creates no events and redirects no class."""

from typing import Any

import pytest
import torch
from helpers import layout, model_configs, model_layers


class Event:
    """In place of an event; `redirected` tells what `torch.cuda.Event` then was."""

    redirected: list[bool] = []  # noqa: RUF012

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.redirected.append(torch.cuda.Event is not CudaEvent)


class CudaEvent(Event):
    pass


@pytest.fixture(autouse=True)
def events(monkeypatch: pytest.MonkeyPatch) -> None:
    assert layout.device()  # the platform is chosen before anything is replaced
    monkeypatch.setattr(Event, "redirected", [])
    monkeypatch.setattr(torch.cuda, "Event", CudaEvent)
    monkeypatch.setattr(torch.xpu, "Event", Event)


@pytest.mark.parametrize("compress_ratio", layout.COMPRESS_RATIOS)
def test_no_other_thread_sees_a_redirected_event(compress_ratio: int) -> None:
    model_layers.attention_layer(model_configs.vllm_config(), compress_ratio)
    assert not any(Event.redirected), (
        f"torch.cuda.Event was redirected while {len(Event.redirected)} were created"
    )


def test_no_event_is_created_without_streams() -> None:
    layer = model_layers.attention_layer(model_configs.vllm_config(), 4)
    assert not Event.redirected, f"{len(Event.redirected)} events were created"
    assert set(layer.ln_events) == {None} == set(layer.indexer.ln_events)


@pytest.mark.unchanged
def test_cuda_keeps_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    monkeypatch.setattr(
        current_platform,
        "get_device_capability",
        lambda *args, **kwargs: DeviceCapability(9, 0),
    )
    layer = model_layers.attention_layer(
        model_configs.vllm_config(),
        4,
        kind=model_layers.cuda_attention_class(),
        aux_streams=[object()] * 3,
    )
    assert [type(event) for event in layer.ln_events] == [CudaEvent] * 4
    assert [type(event) for event in layer.indexer.ln_events] == [CudaEvent] * 2
