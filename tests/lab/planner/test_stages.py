# SPDX-License-Identifier: Apache-2.0
"""Stages of a split that are alike."""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

PROGRAMS = Path(__file__).parents[3] / "lab/planner/programs"


def test_a_stage_that_stands_for_others_lends_them_no_description(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """v0.26.0 pads each layer's in place, and knows none that is padded already."""
    utils = ModuleType("vllm.distributed.utils")
    utils.get_pp_indices = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.distributed.utils", utils)
    monkeypatch.syspath_prepend(PROGRAMS)
    stages = importlib.import_module("stages")
    spec = SimpleNamespace(page_size_padded=None)
    stage = {"answers": {"get_kv_cache_spec": {"model.layers.3.attn": spec}}}
    caches = stages.moved(stage, 4)["answers"]["get_kv_cache_spec"]
    (name, its) = caches.popitem()
    its.page_size_padded = 37440
    assert (name, spec.page_size_padded) == ("model.layers.7.attn", None)
