"""The run that a person wants to enter, and checks that the run and this peer agree.

The checks compare the requested settings, the text, and the admission.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from swarm.config import RunConfig
from swarm.data.corpus import STANDARD_LIBRARY
from swarm.errors import BadManifest, ConfigError, InvitationError, RunMismatch, TextMismatch
from swarm.protocol.membership.membership import Guests
from swarm.protocol.values.invitation import Credential, PrivateInvitation
from swarm.protocol.values.manifest import Digest, Manifest, PeerId
from swarm.protocol.values.texts import Text


def explain_difference(asked: RunConfig, running: RunConfig) -> str:
    """Settings in which a joiner's file differs from the run, in words."""
    asked_flat, running_flat = _flat(asked.model_dump()), _flat(running.model_dump())
    return ", ".join(
        f"{key}: asked {asked_flat.get(key)!r}, the run has {running_flat.get(key)!r}"
        for key in sorted(asked_flat.keys() | running_flat.keys())
        if asked_flat.get(key) != running_flat.get(key)
    )


_BESIDE = "join it without --run, leave --initial-peers out, or found a second run with --new-run"


def require_no_other(wanted: RunConfig, there: Iterable[tuple[str, RunConfig]]) -> None:
    """Refuses to found a second run at an address that already serves one.

    Args:
        wanted: the configuration of the run to be founded.
        there: id and configuration of each run at the given addresses.

    Raises:
        RunMismatch: there is a run. The message names its differences from the file.
    """
    for name, running in there:
        raise RunMismatch(
            f"{name} runs there, which is not the run of this file: "
            f"{explain_difference(wanted, running)}",
            hint=_BESIDE,
        )


def require_no_founder(wanted: RunConfig, preparing: Mapping[PeerId, str]) -> None:
    """Refuses to found a run if a peer at the given addresses founds another run.

    Args:
        wanted: the configuration of the run to be founded.
        preparing: peers there that found a run, with the run's fingerprint.

    Raises:
        RunMismatch: a peer there founds another run.
    """
    for peer, fingerprint in preparing.items():
        if fingerprint != wanted.fingerprint():
            raise RunMismatch(
                f"peer {peer} founds a run there, which is not the run of this file", hint=_BESIDE
            )


def require_settings(run: RunConfig, overrides: Mapping[str, object]) -> None:
    """Refuses a joiner's `--rounds` and `--set` if they differ from the run's settings.

    Raises:
        RunMismatch: names every difference.
    """
    have = _flat(run.model_dump(mode="json"))  # lists, as they are read
    wrong = [
        f"{key}: asked {value!r}, the run has {have.get(key)!r}"
        for key, value in overrides.items()
        if have.get(key) != value
    ]
    if wrong:
        raise RunMismatch("; ".join(wrong), hint="leave the option out to join as it is")


def require_closed_founding(run: RunConfig, *, is_open: bool) -> None:
    """Refuses to gather strangers for a run that admits invited peers only.

    Raises:
        ConfigError: the message says how such a run is founded.
    """
    if run.run.admission == "invited" and is_open:
        raise ConfigError(
            'run.admission = "invited" with --open-gathering: strangers would be let in and vote',
            hint="leave --open-gathering out, and pass on the whole line that the founder prints",
        )


def require_admission(
    run_id: str, run: RunConfig, tip: Manifest, me: PeerId, credential: Credential | None
) -> None:
    """Refuses to join a run that would not admit this peer, or would refuse its credential.

    Raises:
        InvitationError: the invitation is missing, expired, used up, of another run, or not issued
            by an anchor.
    """
    if me in tip.members:
        return
    is_open = run.run.admission == "open"
    shown = {me: credential} if credential else {}
    guests = Guests.of(tip, shown, run=run_id, is_open=is_open)
    if guests.may_come(me) and (credential is None or guests.problem(me) is None):
        return
    kind = "anybody" if is_open else "only peers that are invited"
    raise InvitationError(
        f"{guests.problem(me)}; the run takes in {kind}",
        hint="ask the founder, or whom it invited, for what swarm-invite prints"
        + (", or join without --invitation" if is_open else ", and give it to --invitation"),
    )


SHARDS = ", or the founder's shards, if it made some with swarm-data tokenize"
"""Added if both texts have the same name, as shards of one text have, whatever their options."""


def require_text(needed: Text, have: Text, root: Path) -> None:
    """Refuses a machine's text if it differs from the run's; only names may differ.

    Args:
        needed: the text in manifest 0.
        have: the text of this machine.
        root: the folder of the text.

    Raises:
        TextMismatch: the texts differ; the message has both, with digests and sizes.
        BadManifest: the digests are equal, and other fields of the run's text differ.
    """
    if replace(have, name=needed.name) == needed:
        return
    if have.tokenizer != needed.tokenizer:
        raise TextMismatch(
            f"the run's tokenizer is {needed.tokenizer}, this machine's is {have.tokenizer}",
            hint="install the version of swarm that the run's founder has",
        )
    if have.digest == needed.digest:
        raise BadManifest("manifest_text", f"manifest 0 is wrong about {_described(needed)}")
    raise TextMismatch(
        f"the run trains on {_described(needed)}, and this machine has {_described(have)} "
        f"in {root}",
        hint=_remedy(needed) + (SHARDS if have.name == needed.name else ""),
    )


def missing_text(needed: Text, problem: str) -> TextMismatch:
    """The error of a peer that cannot read any text; `problem` is the reason."""
    return TextMismatch(
        f"the run trains on {_described(needed)}, and this machine has no text: {problem}",
        hint=_remedy(needed),
    )


def joiners_need(text: Text | None) -> str:
    """A sentence that names the text that a joiner needs; None: each peer has its own text."""
    if text is None:
        return "In this run every peer trains on its own text: joiners name theirs, --corpus FOLDER"
    if text.name.startswith(STANDARD_LIBRARY):
        how = "without --corpus and with the same Python"
    else:
        how = "by --corpus FOLDER"
    return f"This run trains on {_described(text)}: joiners need the same, {how}"


def _described(text: Text) -> str:
    return (
        f"the text '{text.name}' (digest {text.digest}, {text.tokens:,} tokens in "
        f"{text.documents:,} documents)"
    )


def _remedy(needed: Text) -> str:
    if needed.name.startswith(STANDARD_LIBRARY):
        version = needed.name.removeprefix(STANDARD_LIBRARY).strip()
        return (
            f"leave --corpus out and use Python {version}, from where the founder has it: some "
            "distributions change its library"
        )
    return f"name a folder that holds the files of '{needed.name}' unchanged: --corpus FOLDER"


def _flat(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


@dataclass(frozen=True)
class Wanted:
    """The run that a person wants.

    Attributes:
        run: the required configuration; None accepts any.
        run_id: id of the wanted run, if several runs are announced or on disk.
        settings: required values, by `section.field`, if `run` is not given.
        invitation: the invitation with which this peer asks to join.
        beside_others: whether `run` may be founded although there is another run, at the given
            addresses or unfinished in the state directory.
        vouched: the head that the person trusts (`--tip`); None for manifest 0.
        tokenizer: folder with the tokenizer.json that a founder gives its run, or that a joiner's
            run must have. None if tokens are bytes, or if a joiner accepts any tokenizer.
        initialise_from: checkpoint folder with the weights that a founder gives its run; ignored
            when a run is joined or resumed.
    """

    run: RunConfig | None = None
    run_id: str | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    invitation: PrivateInvitation | None = None
    vouched: Digest | None = None
    beside_others: bool = False
    tokenizer: Path | None = None
    initialise_from: Path | None = None

    def require(self, run: RunConfig) -> None:
        """Refuses a run that differs from the request.

        Raises:
            RunMismatch: names every difference.
        """
        if self.run is None:
            require_settings(run, self.settings)
        elif difference := explain_difference(self.run, run):
            raise RunMismatch(difference)
