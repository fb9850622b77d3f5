# SPDX-License-Identifier: Apache-2.0
"""From a step's test module to its verdict.

In: the module and the builds before and after the step. Out: both runs' outcomes and
whether they prove the step.
"""
