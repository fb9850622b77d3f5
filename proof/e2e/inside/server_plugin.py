# SPDX-License-Identifier: Apache-2.0
"""vLLM's plugin in each process of a server: what `engine.py` does for its own."""


def register() -> None:
    """Repair Triton's interpreter and provide what the ops do not."""
    from proof.e2e.inside import engine_ops
    from standins import interpreter, interpreter_speed

    interpreter.repair()
    interpreter_speed.speed_up()
    engine_ops.provide()
