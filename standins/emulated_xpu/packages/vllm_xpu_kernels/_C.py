# SPDX-License-Identifier: Apache-2.0
"""Registers the ops, as the extension module of this name does."""

from standins.emulated_xpu.registry import define_ops

define_ops()
