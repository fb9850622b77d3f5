# SPDX-License-Identifier: Apache-2.0
"""A start names the loader that checks, for the model and its draft."""

import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import layout
from helpers.loading import NAME, Model

from . import starts

LOADERS = "vllm.model_executor.model_loader"
FORMATS = ["auto", "hf", "safetensors", "fastsafetensors"]


def registered() -> Any:
    """What vLLM has once its general plugins were loaded, as each process does."""
    layout.module("vllm_xpu_dsv4").register_loader()
    return layout.module("vllm_xpu_dsv4.loader").CheckedLoader


@pytest.mark.parametrize("load_format", FORMATS)
def test_checkpoints_are_loaded_with_checks(load_format: str, tmp_path: Path) -> None:
    config = starts.configured(tmp_path, {}, load_format=load_format).load_config
    found = config.load_format
    assert found == f"{load_format}+xpu_dsv4", f"the start ends with {found}"
    kind = registered()
    loader = layout.module(LOADERS).get_model_loader(config)
    assert type(loader) is kind
    assert loader.load_config.load_format == load_format
    assert config.load_format == found


def test_each_process_hears_of_the_loader() -> None:
    """These plugins are loaded by vLLM in all of its processes."""
    points = {point.name: point for point in entry_points(group="vllm.general_plugins")}
    assert "xpu_dsv4" in points, f"the start ends with {sorted(points)}"
    assert points["xpu_dsv4"].load() is layout.module("vllm_xpu_dsv4").register_loader


@pytest.mark.parametrize("other", [False, True])
def test_processes_of_other_platforms_do_not(
    other: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "vllm_xpu_dsv4.loader"
    package, platforms = layout.module("vllm_xpu_dsv4"), layout.module("vllm.platforms")
    sys.modules.pop(name, None)
    with monkeypatch.context() as patch:
        if other:
            patch.setattr(platforms, "current_platform", object())
        package.register_loader()
        heard = name in sys.modules
    registered()
    assert heard != other


@pytest.mark.unchanged
def test_other_formats_stay(tmp_path: Path) -> None:
    config = starts.configured(tmp_path, {}, load_format="dummy")
    assert config.load_config.load_format == "dummy"


def test_a_draft_of_another_format_is_checked_too() -> None:
    formats = [SimpleNamespace(load_format=name) for name in ("auto", "hf")]
    config = SimpleNamespace(
        load_config=formats[0],
        speculative_config=SimpleNamespace(draft_load_config=formats[1]),
    )
    layout.module("vllm_xpu_dsv4.load_formats").check_checkpoint(config)
    assert [it.load_format for it in formats] == ["auto+xpu_dsv4", "hf+xpu_dsv4"]


@pytest.mark.parametrize(("kind", "of_draft"), [("generate", False), ("draft", True)])
def test_the_model_takes_what_was_compared(
    kind: str, of_draft: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the checkpoint's names, before it is noted what came."""
    checked = registered()
    config = starts.configured(tmp_path, {})
    model_config = config.model_config
    monkeypatch.setattr(model_config, "runner_type", kind)
    given = {"mtp.0.norm.weight": torch.ones(4).int(), "norm.weight": torch.ones(4)}
    plain = layout.module(f"{LOADERS}.default_loader").DefaultModelLoader
    monkeypatch.setattr(plain, "get_all_weights", lambda *_: iter(given.items()))
    loader = checked(config.load_config)
    model = Model(torch.bfloat16)
    if of_draft:
        with pytest.raises(ValueError, match=r"mtp\.0\.norm\.weight is int32"):
            list(loader.get_all_weights(model_config, model))
    else:
        assert dict(loader.get_all_weights(model_config, model)) == given


def test_the_loader_sees_the_model_and_what_it_loaded() -> None:
    model = Model(torch.bfloat16)
    listening = layout.module("vllm_xpu_dsv4.loader")._Listening(model)
    assert listening.part is model.part
    with pytest.raises(AttributeError, match="secondary_weights"):
        listening.secondary_weights  # noqa: B018
    loaded = listening.load_weights([(NAME, torch.ones(4, 4))])
    assert loaded == listening.loaded == {NAME}


def test_a_server_of_the_tower_alone_lacks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads shards that have a part of the text model."""
    module = layout.module("vllm_xpu_dsv4.loader")
    for alone in (True, False):
        options = SimpleNamespace(mm_encoder_only=alone)
        config = SimpleNamespace(multimodal_config=options)
        assert module._has_tower_alone(config) == alone
    assert not module._has_tower_alone(SimpleNamespace(multimodal_config=None))
