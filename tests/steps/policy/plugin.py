# SPDX-License-Identifier: Apache-2.0
"""vLLM takes the plugin where it finds an XPU, and another platform's before it."""

import os
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any
from unittest.mock import MagicMock

import pytest
from helpers import layout

PLATFORM = "vllm_xpu_dsv4.platform.DeepSeekV4XPUPlatform"
GROUP = "vllm.platform_plugins"
OTHERS = "somebody_elses"


def found(name: str) -> EntryPoint:
    points = {point.name: point for point in entry_points(group=GROUP)}
    assert name in points, f"the start ends with the platforms {sorted(points)}"
    return points[name]


def chosen(
    monkeypatch: pytest.MonkeyPatch, plugins: str, xpu: str | None = "vllm's own"
) -> Any:
    """The platform that vLLM takes where it finds an XPU, or none."""
    platforms = layout.module("vllm.platforms")
    found("xpu_dsv4").load()
    sys.modules["vllm_xpu_dsv4"]._another_is_active.cache_clear()
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    monkeypatch.setattr(platforms, "xpu_platform_plugin", lambda: xpu)
    builtin = platforms.builtin_platform_plugins
    monkeypatch.setitem(builtin, "xpu", platforms.xpu_platform_plugin)
    return platforms.resolve_current_platform_cls_qualname()


def test_vllm_takes_it_where_there_is_an_xpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, "xpu_dsv4") == PLATFORM


def test_without_an_xpu_vllm_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, "xpu_dsv4", xpu=None) != PLATFORM


def test_it_is_switched_off_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XPU_DSV4_POLICY", "0")
    assert chosen(monkeypatch, "xpu_dsv4") == "vllm's own"


def test_it_does_not_ask_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen(monkeypatch, "xpu_dsv4")
    package = layout.module("vllm_xpu_dsv4")
    package._another_is_active.cache_clear()
    asked = MagicMock(return_value="vllm's own")
    monkeypatch.setattr(layout.module("vllm.platforms"), "xpu_platform_plugin", asked)
    assert package.register() == PLATFORM
    asked.assert_called_once_with()


def fails() -> str:
    raise RuntimeError("no device of this vendor")


@pytest.mark.parametrize(
    ("other", "wanted"),
    [(lambda: "theirs", "theirs"), (lambda: None, PLATFORM), (fails, PLATFORM)],
    ids=["active", "inactive", "failing"],
)
def test_another_platform_goes_first(
    other: Callable[[], str | None], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two of them a start of vLLM ends."""
    plugins = {"xpu_dsv4": found("xpu_dsv4").load(), OTHERS: other}
    for name in ("vllm.plugins", "vllm.platforms"):
        module = layout.module(name)
        monkeypatch.setattr(module, "load_plugins_by_group", lambda group: plugins)
    assert chosen(monkeypatch, f"xpu_dsv4,{OTHERS}") == wanted


def test_the_platform_of_this_run_derives_from_it() -> None:
    """So every other test here runs under it, and each engine on the emulated XPU."""
    running = layout.module("vllm.platforms").current_platform
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(running).__mro__]
    assert PLATFORM in names, f"the start ends with {names}"
    assert "vllm.platforms.xpu.XPUPlatform" in names


def test_what_it_says_is_in_vllms_log() -> None:
    """Its log has what loggers below its own say."""
    said = layout.module("vllm_xpu_dsv4.start").logger
    assert said.name.startswith("vllm.")


if hasattr(layout.module("vllm.platforms.xpu").XPUPlatform, "validate_environ"):

    def test_its_variable_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
        """A variable of its prefix that vLLM does not know may end a start."""
        running = layout.module("vllm.platforms").current_platform
        for name in list(os.environ):
            if name.startswith("VLLM_"):
                monkeypatch.delenv(name)
        monkeypatch.setenv("VLLM_XPU_GRAPH_CHECK", "stop")
        try:
            running.validate_environ(hard_fail=True)
        except ValueError as error:
            pytest.fail(f"the start ends with {error}")
        assert os.environ["VLLM_XPU_GRAPH_CHECK"] == "stop"
        monkeypatch.setenv("VLLM_XPU_OTHER", "1")
        with pytest.raises(ValueError, match="VLLM_XPU_OTHER"):
            running.validate_environ(hard_fail=True)
