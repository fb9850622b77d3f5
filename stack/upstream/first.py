# SPDX-License-Identifier: Apache-2.0
"""The first request, below the branches of all others: what their tests share."""

FIRST = "tests"
"""What the branch of the first commit is called after."""
FIRST_SUBJECT = "[Test][XPU][DSv4] Add what DeepSeek-V4's tests on XPU share"
FIRST_MESSAGE = f"""\
{FIRST_SUBJECT}

Tests of DeepSeek-V4 on XPU build its layers, caches and metadata. Add the functions
that do so, and one CI job that runs the folder on an XPU; on a CPU another runs the
tests that need no XPU. The requests that follow bring their test files alone."""
