# SPDX-License-Identifier: Apache-2.0
"""On import: what nearly every test of DeepSeek-V4 on the emulated XPU imports.

A process that has imported it can run several tests, each in a fork of its own.
"""

import importlib

from standins.emulated_xpu import pytest_plugin

pytest_plugin.prepare()

from vllm.model_executor.models.registry import ModelRegistry  # noqa: E402

ModelRegistry.models["DeepseekV4ForCausalLM"].load_model_cls()
# Layers are built under what the worker's runner sets.
importlib.import_module("vllm.v1.worker.xpu_model_runner")
