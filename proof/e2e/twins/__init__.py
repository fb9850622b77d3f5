# SPDX-License-Identifier: Apache-2.0
"""Models in float32, and how an engine's records are held against them."""
