# SPDX-License-Identifier: Apache-2.0
"""Applies patches to make trees, and writes patches back from commits.

In: `patches/`, `vllm_overlay/`, `kernels/` and a base. Out: one commit per step in the
store, work repositories to edit the steps in, and patches again from their commits.
"""
