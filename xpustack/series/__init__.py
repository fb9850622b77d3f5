# SPDX-License-Identifier: Apache-2.0
"""From patches to trees, and back.

In: `patches/`, `vllm_overlay/`, `kernels/` and a base. Out: one commit a step in the
store, work repositories to edit them in, and patches again from their commits.
"""
