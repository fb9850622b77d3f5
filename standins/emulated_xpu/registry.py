# SPDX-License-Identifier: Apache-2.0
"""Defines the ops of a vllm-xpu-kernels version, with stand-ins that compute them."""

from collections import Counter
from typing import Any

import torch

import standins.emulated_xpu.ops  # noqa: F401  (its modules register what computes the ops)
from standins.emulated_xpu.architectures import chip, limit
from standins.emulated_xpu.wheel.implementations import IMPLEMENTATIONS, Implementation
from standins.emulated_xpu.wheel.pins import kernels_version, schemas

_libraries: dict[str, torch.library.Library] = {}
_defined: dict[str, str] = {}
calls: Counter[str] = Counter()
"""How often each op ran, by qualified name."""


def define_ops(version: str | None = None) -> None:
    """Define every op of a vllm-xpu-kernels version; a second call changes nothing.

    Args:
        version: None for the one that the installed vLLM pins.

    Raises:
        LookupError: the version is unknown.
        RuntimeError: another version's ops are defined in this process already.
    """
    version = version or kernels_version()
    if _defined:
        if _defined["version"] != version:
            raise RuntimeError(
                f"ops of vllm_xpu_kernels {_defined['version']} are defined already,"
                f" {version} was asked for"
            )
        return
    for name, schema in schemas(version).items():
        namespace = name.partition("::")[0]
        library = _libraries.get(namespace)
        if library is None:
            library = torch.library.Library(namespace, "FRAGMENT")
            _libraries[namespace] = library
        library.define(schema)
        library.impl(
            schema.partition("(")[0],
            _stand_in(name, schema, version),
            "CompositeExplicitAutograd",
        )
    _defined["version"] = version


def namespaces() -> frozenset[str]:
    """Those of the defined ops."""
    return frozenset(_libraries)


def _stand_in(name: str, schema: str, version: str) -> Implementation:
    implementation, limited = IMPLEMENTATIONS.get(name), limit(name, version)
    tensors = [
        (position, argument.name)
        for position, argument in enumerate(torch._C.parse_schema(schema).arguments)
        if argument.type.kind() == "TensorType"
    ]

    def run(*args: Any, **kwargs: Any) -> Any:
        # torch accepts None for any tensor; the kernel of a device would fail on it.
        for position, argument in tensors:
            value = args[position] if position < len(args) else kwargs[argument]
            if value is None:
                raise TypeError(f"{name}: {argument} must be a tensor, it is None")
        calls[name] += 1
        if limited and (device := chip()) not in limited.chips:
            raise limited.error(device)
        if implementation is None:
            raise NotImplementedError(
                f"{name} has no stand-in on the emulated XPU:"
                f' add one with @implements("{name}") in standins/emulated_xpu/ops/'
            )
        return implementation(*args, **kwargs)

    return run
