"""Adopter: decided manifests are fetched whole and applied at once [X1, P4, GC] (stuck fetches)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from swarm.protocol.chain.chain_record import regained
from swarm.protocol.chain.gaps import filled
from swarm.protocol.chain.trust import RECENT, proof_problem, reform_electors, step_problem
from swarm.protocol.messages import events
from swarm.protocol.messages.messages import Certificate, Commit, Link, accept_statement
from swarm.protocol.rounds.blobs import Blobs, CatchUp
from swarm.protocol.rounds.contacts import Contacts, Gossip
from swarm.protocol.rounds.contributor import Contributor
from swarm.protocol.rounds.durable_state import Role
from swarm.protocol.rounds.merger import Merger
from swarm.protocol.rounds.policies.checks import commit_problem
from swarm.protocol.rounds.reform_choice import ReformChoice
from swarm.protocol.rounds.state import Heights, Life, Work
from swarm.protocol.values.manifest import Digest, Kind, Manifest, PeerId


@dataclass(eq=False)
class Adopter(Role):
    """Fetches and applies decided manifests."""

    life: Life
    contacts: Contacts
    blobs: Blobs
    work: Work
    merger: Merger
    contributor: Contributor
    gossip: Gossip
    reform_choice: ReformChoice
    heights: Heights
    _lingering: tuple[Manifest, ...] = field(init=False, default=())
    """Manifests of a generation that this peer has left."""
    _appended: int = field(init=False, default=0)
    """How many links were appended to the chain's file since its last rewrite, or since the
    start."""

    def on_commit(self, source: PeerId, commit: Commit) -> None:
        """Checks a manifest that is said to be decided, and adopts it if it beats the tip."""
        manifest = commit.manifest
        if manifest.code < self.tip.code:
            self.gossip.tell_tip(source, manifest.code)
        if not self.standing.is_better(manifest) or self._is_being_fetched(manifest):
            return
        commit = replace(commit, path=tuple(self.standing.chain.rooted(commit.path)))
        if self._lacks_proof(commit):
            self.gossip.ask_tip(source)
            return
        problem = self._commit_problem(commit)
        if problem:
            self.out.refuse(source, "COMMIT", f"manifest {manifest.digest[:12]}: {problem}")
            return
        self.contacts.remember(manifest.members)
        self._consider(source, commit)

    def _lacks_proof(self, commit: Commit) -> bool:
        """Whether this peer must ask for a proof that begins with a head that it trusts [L1].

        The COMMIT that a convener sends to all peers has no proof, since most peers have the parent
        as tip.
        """
        if not self.rules.certificates or commit.manifest.parent == self.tip.digest:
            return False
        return not commit.path or commit.path[0].head.digest not in self.standing.chain.trusted

    def _commit_problem(self, commit: Commit) -> str | None:
        """Why a COMMIT is not believed; None when it is."""
        return commit_problem(commit, self.tip, self.rules) or self._unproved(commit)

    def _unproved(self, commit: Commit) -> str | None:
        """Why a manifest does not follow from heads that this peer trusts; or None [L1, L2]."""
        head = commit.manifest.head
        if not self.rules.certificates:
            return None
        if head.parent == self.tip.digest:
            return step_problem(self.tip.head, Link(head, commit.certificate))
        return proof_problem(commit.path, head, self.standing.chain.trusted)

    def _consider(self, source: PeerId, commit: Commit) -> None:
        """Adopts a manifest, unless it descends from a reform of a live generation [F2]."""
        manifest = commit.manifest
        self.reform_choice.set_reform_aside()
        if (
            not self.reform_choice.leaves_my_generation(manifest)
            or self.reform_choice.may_leave_generation()
        ):
            self.adopt(source, commit)
        else:
            self.reform_choice.hold_back(source, commit)

    def _is_being_fetched(self, manifest: Manifest) -> bool:
        """Whether a COMMIT is a duplicate, which must not restart the fetch [X1]."""
        pursuit = self.blobs.catch_up
        return pursuit is not None and pursuit.manifest.digest == manifest.digest

    def adopt(self, source: PeerId, commit: Commit) -> None:
        """Fetches the manifest and applies it; a better manifest replaces a running fetch.

        A complete manifest that is being made durable is applied first. Otherwise a slow disk would
        start over with each new manifest, and never apply any. A disk that hangs delays newer
        manifests for a limited time [X1].
        """
        manifest, blobs = commit.manifest, self.blobs
        if self._is_being_fetched(manifest):
            return
        replaced, proposal = blobs.catch_up, blobs.proposal
        if replaced and (self._is_nearly_here(replaced) or replaced.manifest.code > manifest.code):
            return
        blobs.cancel_fetch(events.Purpose.CATCH_UP, replaced)
        signers = sorted(commit.certificate.signatures) if commit.certificate else []
        pursuit = blobs.catch_up = CatchUp(
            manifest,
            blobs.missing(manifest),
            tuple(dict.fromkeys([source, *signers])),
            moves=blobs.moves_of(manifest, commit.parent),
            since=self.now,
            # Only arriving blobs count as progress, not a newer manifest (stuck fetches).
            progress_at=replaced.progress_at if replaced else self.now,
            commit=commit,
            began_at=replaced.began_at if replaced else self.now,
        )
        if proposal and proposal.manifest.digest == manifest.digest:
            blobs.cancel_fetch(events.Purpose.PROPOSAL, proposal)
            pursuit.is_syncing = proposal.is_syncing
        self.pursue()

    def _is_nearly_here(self, pursuit: CatchUp) -> bool:
        age_s = self.now - pursuit.progress_at
        return pursuit.is_syncing and age_s <= self.timers.patience_s

    def pursue(self) -> None:
        """Continues towards applying the decided manifest, if there is one."""
        self.reform_choice.set_reform_aside()
        pursuit = self.blobs.catch_up
        if pursuit is None:
            return
        if self._may_apply(pursuit):
            self._apply_decided(pursuit.commit)
        elif self.blobs.is_complete(pursuit):
            self.blobs.start_sync(pursuit)
        elif not pursuit.is_fetching and not self.merger.awaits_own_merge(pursuit):
            members = {**self.tip.members, **pursuit.manifest.members}
            self.blobs.start_fetch(events.Purpose.CATCH_UP, pursuit, sorted(members))

    def _may_apply(self, pursuit: CatchUp) -> bool:
        """Whether every blob of a decided manifest is here and durable [X1]."""
        return self.blobs.is_complete(pursuit) and pursuit.manifest.digest in self.blobs.synced

    def _apply_decided(self, commit: Commit) -> None:
        manifest = commit.manifest
        parent = self.tip if manifest.parent == self.tip.digest else commit.parent
        text = (
            f"round {manifest.round} (height {manifest.height}, {manifest.kind.value}) applied: "
            f"{len(manifest.contributors)} contributors, {len(manifest.members)} members, "
            f"{len(manifest.voters)} with a vote"
        )
        self.apply(replace(commit, parent=parent), text)

    def apply(self, commit: Commit, text: str) -> None:
        """Makes the new tip durable in one write, then has the whole model applied at once [P4]."""
        old, manifest = self.standing.record, commit.manifest
        certificate = self.with_own_signature(commit)
        record = events.Record(
            manifest,
            certificate,
            commit.parent,
            abstain_until_height=old.abstain_until_height,
            regained=regained(old, manifest, self.me, self.work.offer),
        )
        links = self._lengthen_chain(commit, certificate)
        self.standing.persist(record, links)
        self._appended += len(links)
        if self._appended >= max(RECENT, len(self.standing.chain.links)):
            self._rewrite_chain()
        pursuit = self.blobs.catch_up
        self.work.fetched_s = 0.0
        if pursuit and self._is_being_fetched(manifest):
            self.work.fetched_s = self.now - pursuit.began_at
        self.out.explain(
            events.Topic.FORK if manifest.kind is Kind.REFORM else events.Topic.ROUND, text
        )
        self.out.emit(events.Apply(manifest, old.tip.digest))
        for sentence in manifest.reasons:
            self.out.explain(events.Topic.MEMBERSHIP, sentence)
        if lack := self.contributor.why_no_vote():
            self.out.explain(events.Topic.ADMISSION, lack)
        self.contacts.remember(manifest.members)
        self.heights.forget(old)
        self._collect_garbage(old)
        self.contributor.check_left()
        self.heights.begin()

    def with_own_signature(self, commit: Commit) -> Certificate | None:
        """The certificate. If this peer is an elector of a reform, it adds its signature [L2]."""
        manifest, certificate, parent = commit.manifest, commit.certificate, commit.parent
        if manifest.kind is not Kind.REFORM or certificate is None:
            return certificate
        if parent is None or self.me not in reform_electors(parent.head):
            return certificate
        statement = accept_statement(self.rules.run, certificate.ballot, manifest.digest)
        signatures = {**certificate.signatures, self.me: self.peer.sign(statement)}
        return replace(certificate, signatures=signatures)

    def _lengthen_chain(self, commit: Commit, certificate: Certificate | None) -> tuple[Link, ...]:
        """Adds the links up to the new tip's head to the chain; returns the new links."""
        head, before = commit.manifest.head, self.standing.chain
        step = commit.path[-1] if commit.path else Link(head)
        parent = commit.parent.head if commit.parent else step.parent
        last = Link(head, certificate, parent, step.alike)
        self.standing.chain = before.grown((*commit.path[:-1], last))
        return self.standing.chain.beyond(before)

    def on_heads_found(self, event: events.HeadsFound) -> None:
        """Puts lost links back into the chain, which then proves the tip to more peers."""
        standing = self.standing
        standing.chain, problem = filled(standing.chain, event.links)
        if problem:
            self.out.explain(events.Topic.ROUND, f"heads were not put into the chain: {problem}")
            return
        self._rewrite_chain()
        first, last = event.links[0].head.height, event.links[-1].head.height
        text = f"the chain of heads is whole again from height {first} to {last}"
        self.out.explain(events.Topic.ROUND, text)

    def _rewrite_chain(self) -> None:
        self._appended = 0
        self.out.emit(events.RewriteChain(self.standing.chain.links))

    def _collect_garbage(self, old: events.Record) -> None:
        """Names the blobs to keep: those of the tip, the previous tip, and a fetch under way [GC].

        A peer that leaves a generation also keeps the blobs of the parent of its last tip there,
        and of the proposal that it accepted there. Others may still need these blobs to finish that
        round.
        """
        # Manifests that are being synced are kept. If one were dropped and fetched again, the end
        # of the first sync would be mistaken for the end of the second.
        kept = [self.tip, old.tip, *self._lingering, *self.blobs.syncing.values()]
        self._lingering = ()
        if self.tip.generation != old.tip.generation:
            self._lingering = tuple(
                manifest
                for manifest in (old.parent, old.accepted and old.accepted.manifest)
                if manifest
            )
            kept += self._lingering
        if self.blobs.catch_up:
            kept.append(self.blobs.catch_up.manifest)
        digests = frozenset(self._kept_of(kept))
        self.blobs.stored &= digests
        self.blobs.unmade &= digests
        self.blobs.synced &= {manifest.digest for manifest in kept}
        self.blobs.synced.add(self.tip.digest)
        self.out.emit(events.Keep(digests))

    def _kept_of(self, manifests: Iterable[Manifest]) -> Iterator[Digest]:
        for manifest in manifests:
            yield from (*manifest.blobs, *manifest.deltas)

    def _fetch_is_stuck(self) -> bool:
        """Whether a fetch had no progress for `patience_s`: perhaps nobody has the blobs.

        Policy: stuck fetches.
        """
        pursuit = self.blobs.catch_up
        return (
            pursuit is not None
            and not pursuit.is_syncing
            and self.now - pursuit.progress_at > self.timers.patience_s
        )

    def tick(self) -> None:
        """Continues a fetch, or drops a fetch without progress."""
        pursuit = self.blobs.catch_up
        if pursuit is None:
            return
        if self._fetch_is_stuck():
            self.blobs.cancel_fetch(events.Purpose.CATCH_UP, pursuit)
            self.blobs.catch_up = None
            self.life.may_listen_on = False
            self.out.explain(
                events.Topic.ROUND,
                f"gave up fetching height {pursuit.manifest.height}: no new blob for "
                f"{self.now - pursuit.progress_at:.1f} s (limit {self.timers.patience_s:.1f}), "
                f"{len(pursuit.missing)} missing",
            )
        elif not pursuit.is_fetching:
            self.pursue()
