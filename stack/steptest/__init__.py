# SPDX-License-Identifier: Apache-2.0
"""Run a step's test before and after the step, and judge whether it proves the step.

In: the test module and the builds before and after the step. Out: both runs' outcomes
and the verdict.
"""
