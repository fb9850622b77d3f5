# SPDX-License-Identifier: Apache-2.0
"""Routed experts, resident or in a cache of slots."""
