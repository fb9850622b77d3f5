# SPDX-License-Identifier: Apache-2.0
"""Lint one tree against another with the base's own hooks.

In: two trees and their pre-commit configuration. Out: the new findings.
"""
