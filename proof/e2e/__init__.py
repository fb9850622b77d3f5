# SPDX-License-Identifier: Apache-2.0
"""A tiny DeepSeek-V4 through vLLM's engine, beside Hugging Face's model in float32.

`tests/proof/e2e`, `xpustack device` and `lab/benchmarks/xpu_path` are made of them.
"""
