# SPDX-License-Identifier: Apache-2.0
"""Searches for archives exactly where this machine's pip would search.

unearth implements the index protocols but reads no configuration, and pip cannot
download a source archive without running its set-up code. So this module asks pip
for its configuration and sets unearth up with it.
"""

import ast
import os
import shlex
import ssl
import subprocess
import sys
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httpx2
from packaging.version import Version
from unearth import Link, Package, PackageFinder
from unearth.auth import MultiDomainBasicAuth
from unearth.fetchers import Fetcher
from unearth.fetchers.sync import PyPIClient

from stack.core.errors import EnvironmentProblem

PROJECT = "vllm"
_SOURCES = (":env:", "download", "global")
_TIMEOUT = 15.0
"""Seconds that pip waits for an index unless it is told otherwise."""


@dataclass(frozen=True)
class PipConfiguration:
    """The settings of `pip download` by pip's names for them; what is not set is not
    there."""

    settings: Mapping[str, str]

    @classmethod
    def from_listing(cls, listing: str) -> "PipConfiguration":
        """Parse the output of `pip config list`, which includes PIP_* variables.
        They override `[download]`, which overrides `[global]`."""
        settings: dict[str, dict[str, str]] = {section: {} for section in _SOURCES}
        for line in listing.splitlines():
            name, equals, value = line.partition("=")
            section, _, key = name.strip().rpartition(".")
            text = str(ast.literal_eval(value)) if equals else ""
            if text and section in settings:
                settings[section][key.removeprefix("default-")] = text
        return cls(dict(ChainMap(*settings.values())))

    @classmethod
    def of_this_machine(cls) -> "PipConfiguration":
        """Ask the pip of the running interpreter.

        Raises:
            EnvironmentProblem: this interpreter has no working pip.
        """
        command = [sys.executable, "-m", "pip", "config", "list"]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode != 0:
            raise EnvironmentProblem(
                "pip cannot list its configuration",
                detail=process.stderr,
                hint=shlex.join(command),
            )
        return cls.from_listing(process.stdout)

    def index(self) -> "Index":
        """The indexes and find-links, ready to be searched."""
        # unearth falls back to the index that is also pip's default.
        default = str(PackageFinder().sources[0]["url"])
        urls = [self._get("index-url") or default, *self._words("extra-index-url")]
        if self._get("no-index").lower() in ("1", "true", "yes", "on"):
            urls = []
        trusted_hosts = self._words("trusted-host")
        client = PyPIClient(
            trusted_hosts=trusted_hosts,
            verify=self._tls(),
            timeout=float(self._get("timeout") or _TIMEOUT),
            proxy=self._get("proxy") or None,
            follow_redirects=True,
        )
        client.auth = MultiDomainBasicAuth(prompting=False, index_urls=urls)
        finder = PackageFinder(
            # mypy: unearth's own client does not match the protocol it declares.
            cast(Fetcher, client),
            index_urls=urls,
            find_links=list(filter(_exists, self._words("find-links"))),
            trusted_hosts=trusted_hosts,
            ignore_compatibility=True,
            no_binary=[PROJECT],
        )
        return Index(finder, client)

    def _get(self, name: str) -> str:
        return self.settings.get(name, "")

    def _words(self, name: str) -> list[str]:
        return self._get(name).split()

    def _tls(self) -> ssl.SSLContext | bool:
        cert, client_cert = self._get("cert"), self._get("client-cert")
        if not cert and not client_cert:
            return True
        folder = os.path.isdir(cert)
        context = ssl.create_default_context(
            cafile=None if folder else cert or None, capath=cert if folder else None
        )
        if client_cert:
            context.load_cert_chain(client_cert)
        return context


@dataclass(frozen=True)
class Index:
    """Every index that pip would search, and the HTTP client to use."""

    finder: PackageFinder
    client: httpx2.Client

    def final_versions(self, project: str) -> list[Version]:
        """The final versions of a project that are not yanked, oldest first; none if
        no index has the project.

        Raises:
            EnvironmentProblem: an index cannot be reached.
        """
        offered = {
            Version(package.version or "0")
            for package in self.packages(project)
            if not package.link.is_yanked
        }
        return sorted(version for version in offered if not version.is_prerelease)

    def packages(self, requirement: str) -> list[Package]:
        """Every file of a requirement, of vLLM source archives alone. Yanked ones and
        pre-releases are included, because a pin must stay reachable.

        Raises:
            EnvironmentProblem: an index cannot be reached.
        """
        try:
            return list(
                self.finder.find_matches(
                    requirement, allow_yanked=True, allow_prereleases=True
                )
            )
        except httpx2.HTTPError as error:
            raise EnvironmentProblem(
                "cannot reach the package index",
                detail=str(error),
                hint="python -m pip config list",
            ) from error


def link_label(link: Link) -> str:
    """The link for messages: its file name and host, without credentials."""
    host = urlsplit(link.redacted).hostname
    return f"{link.filename} from {host or link.redacted}"


def _exists(place: str) -> bool:
    return "://" in place or os.path.exists(place)
