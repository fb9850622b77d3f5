# SPDX-License-Identifier: Apache-2.0
"""Computations of the stand-ins, one op family a module."""
