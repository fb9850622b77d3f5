# SPDX-License-Identifier: Apache-2.0
"""vLLM's XPU code path on a CPU: a platform plugin and stand-ins for its ops.

A stand-in exists because no Intel GPU is at hand. It carries the true schema of
the op in the pinned vllm-xpu-kernels, and computes in plain torch or refuses.
"""
