# SPDX-License-Identifier: Apache-2.0
"""Manifold-constrained hyper-connections."""
