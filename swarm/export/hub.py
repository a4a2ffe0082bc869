"""Uploads exports to Hugging Face's hub, with a person's account."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from swarm.errors import ConfigError, SwarmError
from swarm.export.facts import ExportFacts

STALE = ("model*.safetensors", "model.safetensors.index.json")
"""Files of the previous export that are deleted unless the new export replaces them."""
HIDDEN = (".*", "*/.*")
"""Names that are not part of an export, such as the folder of a killed exporter's fetched blobs."""


class HubClient(Protocol):
    """The methods of `huggingface_hub.HfApi` that are used here."""

    def create_repo(self, repo_id: str, *, exist_ok: bool) -> object:
        """Makes a repository, if it does not exist."""
        ...

    def upload_folder(
        self,
        *,
        repo_id: str,
        folder_path: Path,
        commit_message: str,
        ignore_patterns: list[str],
        delete_patterns: list[str],
    ) -> object:
        """Uploads a folder in one commit."""
        ...


@dataclass(frozen=True)
class Hub:
    """A repository on the hub.

    Attributes:
        client: connection to the hub.
        repo: name of the repository, such as "somebody/model".
    """

    client: HubClient
    repo: str

    def push(self, folder: Path, facts: ExportFacts) -> None:
        """Uploads an export, in one commit that replaces the previous one.

        Raises:
            SwarmError: the hub refused, or cannot be reached. The export stays in its folder.
        """
        manifest = facts.model.manifest
        message = f"{facts.run_id}, round {manifest.round} (manifest {manifest.digest[:12]})"
        try:
            self.client.create_repo(self.repo, exist_ok=True)
            self.client.upload_folder(
                repo_id=self.repo,
                folder_path=folder,
                commit_message=message,
                ignore_patterns=list(HIDDEN),
                delete_patterns=list(STALE),
            )
        except Exception as error:  # the client raises errors of all its libraries
            raise SwarmError(
                f"{folder} was not pushed to {self.repo}: {error}",
                hint="the export is there: upload it with hf upload",
            ) from error


def open_hub(repo: str) -> Hub:
    """The repository, with this person's token. Sends nothing yet.

    Raises:
        ConfigError: the package is not installed, or there is no token.
    """
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError(
            "--push-to-hub: the package huggingface_hub is not installed",
            hint="pip install 'moe-swarm[hf]'",
        )
    from huggingface_hub import HfApi, get_token  # from the extra hf, only on request

    if not get_token():
        raise ConfigError(
            "--push-to-hub: there is no token of the hub",
            hint="log in with hf auth login, or set HF_TOKEN",
        )
    return Hub(HfApi(), repo)
