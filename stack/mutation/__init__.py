# SPDX-License-Identifier: Apache-2.0
"""Whether a step's test sees each line that the step adds.

In: a release and slugs of its steps. Out: the faults, planted one at a time, at which
the step's own test stays green. Kernels are left out: tests/kernels measures them.

No library does this: cosmic-ray and mutmut delete no statement and drop no operand, and
change a project's own sources, whereas a step's test needs an installed vLLM, and the
lines that a patch adds to it.
"""
