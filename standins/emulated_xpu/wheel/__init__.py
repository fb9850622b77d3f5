# SPDX-License-Identifier: Apache-2.0
"""The ops of vllm-xpu-kernels: the pinned version, its schemas, what computes them."""
