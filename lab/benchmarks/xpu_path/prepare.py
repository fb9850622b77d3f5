# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.benchmarks.xpu_path.prepare`: pack what the GPU's machine lacks.

That machine has Python 3.12, torch and Triton for CUDA, numpy, and no network. What
goes there: wheels of what vLLM imports, the patched and the untouched release as
installed trees, the tiny checkpoint, and this repository's own modules.
"""

import argparse
import filecmp
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from proof.e2e.inside.wrappers import WRAPPERS, wrappers_of
from proof.e2e.running.serving import Engines
from stack.base.releases import load
from stack.core.cache import Cache

ROOT = Path(__file__).resolve().parents[3]
ARCHIVE = "xpu-path.tar.xz"
PYTHON = "3.12"
GLIBCS = (5, 12, 17, 24, 26, 27, 28, 31, 34)
UNREAD = re.compile(
    r"mistral_common/data/|pycountry/locales/|nixl_ep|nixl_cu13(\.scripts|-[^/]*\.data)/"
    r"|\.nixl_cu13\.mesonpy\.libs/plugins/(?!libplugin_UCX)"
    r"|nixl_cu13\.libs/(lib(aws|azure|xml2|gusli)|nixl/|ucx/lib(uct_ib|ucx_perftest))"
)
"""Tables that nothing here reads, and NIXL over what this machine has not: 250 MB."""
OWN = ("lab", "proof", "standins", "kernels")
"""Folders of this repository to copy."""


def download(folder: Path) -> None:
    """Download the wheels of `packages.txt`."""
    words = ["--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    words += ["--python-version", PYTHON, "-d", str(folder)]
    for version in GLIBCS:
        words += ["--platform", f"manylinux_2_{version}_x86_64"]
    for name in ("manylinux1", "manylinux2010", "manylinux2014"):
        words += ["--platform", f"{name}_x86_64"]
    words += ["-c", str(ROOT / "requirements/constraints.txt")]
    words += ["-r", str(Path(__file__).with_name("packages.txt"))]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", *words]
    subprocess.run(pip, check=True)


def pack(archive: Path, release: str) -> None:
    """Write the archive of one release: its tip, what the base has otherwise, the
    wrappers of its kernels, the tiny checkpoint, and what vLLM imports."""
    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        site = work / "site"
        download(work / "wheels")
        for wheel in (work / "wheels").glob("*.whl"):
            with zipfile.ZipFile(wheel) as opened:
                kept = [n for n in opened.namelist() if not UNREAD.match(n)]
                opened.extractall(site, kept)
        engines = Engines(work / "engines", Cache.default())
        pinned = load(engines.project)[release]
        tip, base = (engines.installed(pinned, patched) for patched in (True, False))
        kernels = pinned.xpu_kernels.version
        (work / "xpu-kernels").write_text(kernels)
        (work / "release").write_text(release)
        (work / "removed").write_text("\n".join(sorted(files(tip) - files(base))))
        with tarfile.open(archive, "w:xz", preset=6) as tar:
            for name in sorted(files(tip)):
                tar.add(tip / name, f"patched/{name}")
            for name in sorted(files(base)):
                ours = tip / name
                if not ours.is_file() or not filecmp.cmp(ours, base / name, False):
                    tar.add(base / name, f"differing/{name}")
            # Older ones are on no index; there the class of `emulated_xpu` stands in.
            if kernels in WRAPPERS:
                found = wrappers_of(engines.cache, kernels, engines.work)
                tar.add(found, "wrappers")
            tar.add(engines.published, "checkpoint")
            tar.add(site, "site")
            for name in ("release", "removed", "xpu-kernels"):
                tar.add(work / name, name)


def files(tree: Path) -> set[str]:
    """The files of an installed tree, without byte code."""
    return {
        str(path.relative_to(tree))
        for path in tree.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def copy_own(folder: Path) -> None:
    """Copy this repository's own modules into `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in OWN:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)


def main() -> None:
    """Pack, and say how large it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", default="v0.33.0")
    parser.add_argument("--to", type=Path, default=ROOT / ".carried")
    parser.add_argument(
        "--own", action="store_true", help="this repository's own modules alone"
    )
    arguments = parser.parse_args()
    arguments.to.mkdir(exist_ok=True)
    archive = arguments.to / ARCHIVE
    copy_own(arguments.to / "own")
    if not arguments.own:
        pack(archive, arguments.release)
    size = sum(f.stat().st_size for f in arguments.to.rglob("*") if f.is_file())
    print(f"{arguments.to}: {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
