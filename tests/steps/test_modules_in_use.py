# SPDX-License-Identifier: Apache-2.0
"""XPU's folder of DeepSeek-V4 has no kernel that nothing calls."""

from helpers import layout

FOLDER = layout.PACKAGE / "models/deepseek_v4"


def test_every_module_of_kernels_is_imported() -> None:
    sources = [path.read_text() for path in FOLDER.rglob("*.py")]
    modules = [path.stem for path in (FOLDER / "xpu").glob("xpu_*.py")]
    unused = [
        name
        for name in modules
        if not any(f".{name} import " in source for source in sources)
    ]
    assert not unused, f"nothing imports {', '.join(sorted(unused))}"
