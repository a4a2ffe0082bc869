"""Everybody: decided manifests are fetched whole and applied at once [X1, X2, P4, GC]."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from swarm.protocol.abstaining import abstain_until
from swarm.protocol.events import (
    Apply,
    CancelFetch,
    HeadsFound,
    Keep,
    Left,
    Purpose,
    Record,
    RewriteChain,
    Topic,
)
from swarm.protocol.gaps import filled
from swarm.protocol.manifest import Code, Digest, Kind, Manifest, PeerId
from swarm.protocol.messages import (
    Certificate,
    Commit,
    Hello,
    Link,
    accept_statement,
)
from swarm.protocol.rounds.checks import commit_problem
from swarm.protocol.rounds.fetching import Fetching
from swarm.protocol.rounds.state import CatchUp, Exchanged
from swarm.protocol.trust import Foothold, proof_problem, reform_electors, step_problem
from swarm.protocol.voting import why_no_vote

MAX_KNOWN_PEERS = 512
RELIEF_ROUNDS = 4
"""A reducer that got stuck is one again only after so many rounds."""


class Adopter(Fetching):
    """Takes over what was decided."""

    def _on_commit(self, source: PeerId, commit: Commit) -> None:
        manifest = commit.manifest
        if manifest.code < self.tip.code:
            self._tell_tip(source, manifest.code)
        if not self._is_better(manifest) or self._is_being_fetched(manifest):
            return
        if self._lacks_proof(commit):
            self._ask_tip(source)
            return
        problem = self._commit_problem(commit)
        if problem:
            self._refuse(source, "COMMIT", f"manifest {manifest.digest[:12]}: {problem}")
            return
        self._remember_peers(manifest.members)
        self._consider_commit(source, commit)

    def foothold(self) -> Foothold:
        """From where the shell judges the proofs of strangers, before it fetches what they name."""
        pursued = self._catch_up.manifest.blob if self._catch_up else None
        return Foothold(self.chain, pursued)

    def _lacks_proof(self, commit: Commit) -> bool:
        """Whether a proof that begins with what this peer trusts is still to be asked for [L1].

        A COMMIT that goes to everybody carries none: most of them have the manifest's parent.
        """
        if not self.rules.certificates or commit.manifest.parent == self.tip.digest:
            return False
        return not commit.path or commit.path[0].head.digest not in self.chain.trusted

    def _commit_problem(self, commit: Commit) -> str | None:
        """Why a COMMIT is not believed; None when it is."""
        return commit_problem(commit, self.tip, self.rules) or self._unproved(commit)

    def _unproved(self, commit: Commit) -> str | None:
        """Why a manifest does not follow from what this peer trusts; None when it does [L1, L2]."""
        head = commit.manifest.head
        if not self.rules.certificates:
            return None
        if head.parent == self.tip.digest:
            return step_problem(self.tip.head, Link(head, commit.certificate))
        return proof_problem(commit.path, head, self.chain.trusted)

    def _tell_tip(self, peer: PeerId, code: Code) -> None:
        """Sends COMMIT(tip) to a peer with a lesser tip, at most once per poll period [H1]."""
        if not self._is_rate_limited(self._told, (peer, self.tip.digest)):
            record = self.record
            path = self.chain.proof(code)
            self._post(peer, Commit(self.tip, record.certificate, record.parent, path))

    def _ask_tip(self, peer: PeerId) -> None:
        """Asks a peer that is ahead for its tip, at most once per poll period [H1]."""
        self._somebody_is_ahead = True
        if not self._is_rate_limited(self._asked, (peer, self.tip.digest)):
            self._post(peer, Hello(ask=True))

    def _is_rate_limited(self, last: Exchanged, key: tuple[PeerId, Digest]) -> bool:
        if key in last and self._now - last[key] < self.timers.poll_s:
            return True
        last[key] = self._now
        return False

    def _is_better(self, manifest: Manifest) -> bool:
        """Whether a manifest beats the tip in the total order [F1]; a tip only moves up."""
        return manifest.code > self.tip.code

    def _is_being_fetched(self, manifest: Manifest) -> bool:
        """Whether a COMMIT is a duplicate, which must not restart the fetch [X1]."""
        return self._catch_up is not None and self._catch_up.manifest.digest == manifest.digest

    def _adopt(self, source: PeerId, commit: Commit) -> None:
        """Brings the manifest here and applies it; a better one replaces a running fetch."""
        manifest = commit.manifest
        if self._is_being_fetched(manifest):
            return
        if self._catch_up and self._catch_up.manifest.code > manifest.code:
            return
        replaced = self._catch_up
        self._cancel_fetch(Purpose.CATCH_UP, replaced)
        signers = sorted(commit.certificate.signatures) if commit.certificate else []
        self._catch_up = CatchUp(
            manifest,
            self._missing(manifest),
            tuple(dict.fromkeys([source, *signers])),
            since=self._now,
            # A newer target is no progress: only blobs are [X2].
            progress_at=replaced.progress_at if replaced else self._now,
            commit=commit,
        )
        if self._proposal and self._proposal.manifest.digest == manifest.digest:
            self._cancel_fetch(Purpose.PROPOSAL, self._proposal)
            self._catch_up.is_syncing = self._proposal.is_syncing
        self._pursue_catch_up()

    def _pursue_catch_up(self) -> None:
        pursuit = self._catch_up
        if pursuit is None:
            return
        if self._may_apply(pursuit):
            self._apply_commit(pursuit.commit)
        elif self._is_complete(pursuit):
            self._start_sync(pursuit)
        elif not pursuit.is_fetching and not self._awaits_own_merge(pursuit):
            members = {**self.tip.members, **pursuit.manifest.members}
            self._start_fetch(Purpose.CATCH_UP, pursuit, sorted(members))

    def _may_apply(self, pursuit: CatchUp) -> bool:
        """Whether every blob of a decided manifest is here and durable [X1]."""
        return self._is_complete(pursuit) and pursuit.manifest.digest in self._synced

    def _apply_commit(self, commit: Commit) -> None:
        manifest = commit.manifest
        parent = self.tip if manifest.parent == self.tip.digest else commit.parent
        text = (
            f"round {manifest.round} (height {manifest.height}, {manifest.kind.value}) applied: "
            f"{len(manifest.contributors)} contributors, {len(manifest.members)} members, "
            f"{len(manifest.voters)} with a vote"
        )
        self._apply(replace(commit, parent=parent), text)

    def _apply(self, commit: Commit, text: str) -> None:
        """One atomic write of the new tip, then the whole model at once [P4]."""
        old, manifest = self.record, commit.manifest
        certificate = self._with_own_signature(commit)
        record = Record(
            manifest,
            certificate,
            commit.parent,
            abstain_until_height=abstain_until(old, manifest, self.me, self._offer),
        )
        self._persist(record, self._lengthen_chain(commit, certificate))
        self._explain(Topic.FORK if manifest.kind is Kind.REFORM else Topic.ROUND, text)
        self._effects.append(Apply(manifest, old.tip.digest))
        for sentence in manifest.reasons:
            self._explain(Topic.MEMBERSHIP, sentence)
        if lack := why_no_vote(manifest, self.me, is_open=self.rules.is_open):
            self._explain(Topic.ADMISSION, lack)
        self._remember_peers(manifest.members)
        self._reset_height(old)
        self._collect_garbage(old)
        self._check_left()
        self._begin_height()

    def _with_own_signature(self, commit: Commit) -> Certificate | None:
        """A reform's certificate with this peer among those that have left for it [L2]."""
        manifest, certificate, parent = commit.manifest, commit.certificate, commit.parent
        if manifest.kind is not Kind.REFORM or certificate is None:
            return certificate
        if parent is None or self.me not in reform_electors(parent.head):
            return certificate
        statement = accept_statement(self.rules.run, certificate.ballot, manifest.digest)
        signatures = {**certificate.signatures, self.me: self._sign(statement)}
        return replace(certificate, signatures=signatures)

    def _lengthen_chain(self, commit: Commit, certificate: Certificate | None) -> tuple[Link, ...]:
        """Puts the new tip's head, and what led to it, on the chain; returns what is new there."""
        parent = commit.parent.head if commit.parent else None
        last, before = Link(commit.manifest.head, certificate, parent), self.chain
        self.chain = before.grown((*commit.path[:-1], last))
        return self.chain.beyond(before)

    def _on_heads_found(self, event: HeadsFound) -> None:
        """Puts heads that were passed over into the chain, to prove more to others [L3]."""
        self.chain, problem = filled(self.chain, event.links)
        if problem:
            self._explain(Topic.ROUND, f"heads were not put into the chain: {problem}")
            return
        self._effects.append(RewriteChain(self.chain.links))
        first, last = event.links[0].head.height, event.links[-1].head.height
        self._explain(Topic.ROUND, f"the heads of heights {first} to {last} are in the chain now")

    def _reset_height(self, old: Record) -> None:
        """Forgets everything that referred to the height after the old tip."""
        self._header = self._bind_header()
        if self._proposal and self._proposal.is_fetching:
            self._effects.append(CancelFetch(Purpose.PROPOSAL))
        if self._job and self._job.is_fetching:
            self._effects.append(CancelFetch(Purpose.REDUCE))
        if self._job and not self._job.is_done:
            # The round did without: whom this peer did not reach now it will not in a minute [C4].
            self._reduces_from = self.tip.round + RELIEF_ROUNDS
        self._forget_height()
        self._told = {key: at for key, at in self._told.items() if key[1] == self.tip.digest}
        self._asked.clear()
        # A reform finds local steps done: whoever has finished them offers at once.
        steps_s = self._steps_s if self.tip.kind is not Kind.REFORM else None
        self._ready_at = None if steps_s is None else self._now + steps_s
        if self.tip.generation != old.tip.generation:
            self._heard.clear()
        if self._catch_up and not self._is_better(self._catch_up.manifest):
            self._cancel_fetch(Purpose.CATCH_UP, self._catch_up)
            self._catch_up = None
        if self._candidate and not self._is_better(self._candidate[1].manifest):
            self._candidate = None

    def _collect_garbage(self, old: Record) -> None:
        """Names the blobs to keep: of the tip, the tip before, and a fetch under way [GC].

        A peer that leaves a generation keeps one manifest more, and what it had accepted there:
        others may still need them to finish that round.
        """
        # What is being made durable stays: were it dropped and fetched again, the end of the first
        # sync would be taken for that of the second.
        kept = [self.tip, old.tip, *self._lingering, *self._syncing.values()]
        self._lingering = ()
        if self.tip.generation != old.tip.generation:
            self._lingering = tuple(
                manifest
                for manifest in (old.parent, old.accepted and old.accepted.manifest)
                if manifest
            )
            kept += self._lingering
        if self._catch_up:
            kept.append(self._catch_up.manifest)
        digests = frozenset(_digests(kept))
        self._stored &= digests
        self._synced &= {manifest.digest for manifest in kept}
        self._synced.add(self.tip.digest)
        self._effects.append(Keep(digests))

    def _check_left(self) -> None:
        if self.is_leaving and not self._has_left and not self.is_member:
            self._leave(f"manifest {self.tip.height} lists this peer no longer")

    def _leave(self, reason: str) -> None:
        self._has_left = True
        self._campaign = None
        self._explain(Topic.MEMBERSHIP, f"left: {reason}")
        self._effects.append(Left(reason))

    def _fetch_is_stuck(self) -> bool:
        """Whether a fetch brought nothing new for T_reform / 2: it may be unobtainable [X2]."""
        pursuit = self._catch_up
        return (
            pursuit is not None
            and not pursuit.is_syncing
            and self._now - pursuit.progress_at > self.timers.patience_s
        )

    def _tick_catch_up(self) -> None:
        pursuit = self._catch_up
        if pursuit is None:
            return
        if self._fetch_is_stuck():
            self._cancel_fetch(Purpose.CATCH_UP, pursuit)
            self._catch_up = None
            self._may_listen_on = False
            self._explain(
                Topic.ROUND,
                f"gave up fetching height {pursuit.manifest.height}: no new blob for "
                f"{self._now - pursuit.progress_at:.1f} s (limit {self.timers.patience_s:.1f}), "
                f"{len(pursuit.missing)} missing",
            )
        elif not pursuit.is_fetching:
            self._pursue_catch_up()

    def _remember_peers(self, peers: Iterable[PeerId]) -> None:
        """Peers to greet now and then, also when they are no longer members: forks must meet."""
        for peer in sorted(peers):
            self._known.pop(peer, None)
            self._known[peer] = None
        while len(self._known) > MAX_KNOWN_PEERS:
            self._known.pop(next(iter(self._known)))


def _digests(manifests: Iterable[Manifest]) -> Iterable[Digest]:
    for manifest in manifests:
        yield from (manifest.blob, *manifest.founding.blobs)
        for entry in manifest.entries.values():
            yield entry.digest
