# SPDX-License-Identifier: Apache-2.0
"""Stands in for vllm_xpu_kernels on a machine without an Intel GPU."""
