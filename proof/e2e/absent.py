# SPDX-License-Identifier: Apache-2.0
"""Stands for a grammar backend that is not installed and that no request asks for.

Before vLLM checks a grammar for one backend it imports all of them, and their classes
name types of these packages. Here a type has every name, and nobody can make one.
"""


class _Absent:
    def __init__(self, *args: object, **kwargs: object) -> None:
        raise ModuleNotFoundError(f"{__name__} is not installed for these tests")


def __getattr__(name: str) -> type[_Absent]:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent
