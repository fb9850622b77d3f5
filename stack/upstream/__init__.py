# SPDX-License-Identifier: Apache-2.0
"""What serves requests to vLLM's maintainers: a checked series as pull requests, and
vLLM's own tests before and after a step.

In: a series whose checks have passed. Out: branches, mails and texts for upstream, and
the outcomes of its tests. vLLM itself is not here: `xpustack apply` makes its trees.
"""
