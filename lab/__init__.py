# SPDX-License-Identifier: Apache-2.0
"""Figures, measured or modelled: machine code and what it costs (`aot`), Intel's
lowering executed (`lowered`), benchmarks, the model of memory (`memory`), and plans of
a deployment (`planner`)."""
