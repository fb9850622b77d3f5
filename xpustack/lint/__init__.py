# SPDX-License-Identifier: Apache-2.0
"""From two neighbouring trees to what the base's linters newly complain of.

In: two trees and the configuration of pre-commit in them. Out: findings.
"""
