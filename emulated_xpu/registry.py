# SPDX-License-Identifier: Apache-2.0
"""Op stand-ins under their true schemas."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from emulated_xpu.pins import kernels_version, schemas

Implementation = Callable[..., Any]

_implementations: dict[str, Implementation] = {}
_libraries: dict[str, torch.library.Library] = {}
_defined: dict[str, str] = {}
calls: Counter[str] = Counter()
"""How often each op ran, by qualified name."""


def implements(name: str) -> Callable[[Implementation], Implementation]:
    """Give the op `name` ("namespace::op") its computation in torch.

    The function takes the arguments of the schema. Where pins differ in a schema
    the later arguments have defaults.
    """

    def register(function: Implementation) -> Implementation:
        if name in _implementations:
            raise ValueError(f"{name} is implemented twice")
        _implementations[name] = function
        return function

    return register


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
    import emulated_xpu.ops  # noqa: F401  (registers the implementations)

    for name, schema in schemas(version).items():
        namespace = name.partition("::")[0]
        library = _libraries.get(namespace)
        if library is None:
            library = torch.library.Library(namespace, "FRAGMENT")
            _libraries[namespace] = library
        library.define(schema)
        library.impl(
            schema.partition("(")[0],
            _stand_in(name, schema),
            "CompositeExplicitAutograd",
        )
    _defined["version"] = version


def _stand_in(name: str, schema: str) -> Implementation:
    implementation = _implementations.get(name)
    tensors = [
        (position, argument.name)
        for position, argument in enumerate(torch._C.parse_schema(schema).arguments)
        if argument.type.kind() == "TensorType"
    ]

    def run(*args: Any, **kwargs: Any) -> Any:
        # torch takes None for any tensor; a kernel of a device would fail on it.
        for position, argument in tensors:
            given = args[position] if position < len(args) else kwargs[argument]
            if given is None:
                raise TypeError(f"{name}: {argument} must be a tensor, it is None")
        calls[name] += 1
        if implementation is None:
            raise NotImplementedError(
                f"{name} has no stand-in on the emulated XPU:"
                f' add one with @implements("{name}") in emulated_xpu/ops/'
            )
        return implementation(*args, **kwargs)

    return run
