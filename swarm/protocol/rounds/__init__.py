"""The round machine: how peers without a server agree on one model in each round.

The README.md of this folder has drawings of the machine, and says which role reads and writes which
record. `state`, `durable_state`, `contacts`, `blobs` and `succession` hold the state. The other
files with a class are the roles. `machine` connects them: it takes events and returns effects. The
files of `policies` are pure functions on manifests.

Each rule that safety or progress depends on has a method of its own. Through `Parts`, a test
replaces the method's class by a subclass without the rule, which the simulator must notice:

| rule or policy | method | guarantee |
|---|---|---|
| P1 | `Standing.persist_promise` | a promise is durable before the READY that carries it |
| P2, A2 | `Acceptor._vote` | the vote is written, then sent |
| P2 | `Standing.persist_accepted` | the vote is durable |
| A2, X1 | `Blobs.is_complete` | nothing is accepted or applied in part |
| A2 | `Acceptor._may_accept` | all blobs durable, no higher promise, a member |
| A3 | `Blobs.on_sync_failed` | a failed sync is tried again |
| A1, A2 | `Acceptor._may_follow` | no higher ballot was promised |
| attempt limit | `Acceptor.attempt_problem` | one message cannot use up the ballots of a height |
| P3, C6 | `Acceptor._voted_otherwise` | second line of defence: one vote for each ballot |
| P3 | `Convener._burn_ballot` | a convener's ballot is durable before its first message |
| C1, P3 | `Phase1.may_use_ballot_zero` | attempt 0 is used once, by rank 0 |
| C2 | `Phase1._is_required` | higher attempts need a quorum's promises |
| C2, C6 | `Phase1._promises` | a quorum's promises; those of excluded sources count later |
| C2 | `Phase1._choose_accepted` | the vote with the highest ballot is proposed again |
| A6 | `Averaging._is_result_of_roster` | results of one roster only |
| C5 | `Standing.has_quorum` | a majority, or half with the tie-breaker |
| C5, A2 | `Standing.electorate` | joiners neither promise nor vote |
| C5 | `Proposer.is_chosen` | half of the voters decide only after a wait |
| campaign end | `Succession.why_step_down`, `Convener._why_deaf` | a hopeless campaign ends |
| withholding exclusion | `Withholding.left_out` | a peer that serves nobody delays 1 round in 9 |
| takeover | `Takeover._why_take_over` | a failed convener is replaced |
| takeover | `Takeover._goes_last` | a convener that got no answers waits behind all others |
| P4, X1 | `Adopter._may_apply` | every blob is durable before the tip changes |
| fetch ahead | `Reducer._fetch_ahead` | single-writer experts come while means are computed |
| blob relays | `Blobs.start_fetch`, `Proposer._message` | fast uplinks relay experts, manifests |
| W6 | `Blobs.lacking` | each voter can serve the deltas |
| GC | `Adopter._kept_of` | blobs that others may still need are kept |
| X1 | `Adopter._is_being_fetched` | a duplicate COMMIT does not restart the fetch |
| stuck fetches | `Adopter._fetch_is_stuck` | a fetch without progress is dropped |
| H1 | `Listener.may_handle` | votes count only on equal tips |
| B1 | `Listener.have_spoken` | a peer that boots listens first |
| B1 | `Listener._is_changing_generation` | a booting peer first fetches the survivors' chain |
| B2 | `Listener.was_paused` | a peer that stood still listens again |
| F1 | `Standing.is_better` | the total order of manifests |
| F2 | `ReformChoice.leaves_my_generation` | reforms wait until stalled |
| F2 | `ReformChoice.may_leave_generation` | reforms wait until stalled |
| liveness tracking | `Contacts.ask_unheard` | a live quorum is heard, even of hundreds of voters |
| F2 | `Contacts.hears_quorum` | no reform while a quorum lives |
| F3 | `Reformer._reform_due` | a lost majority is given up |
| F3 | `Reformer._may_reform` | only peers whose reform others believe make one |
| F3 | `Reformer._new_generation` | generations have unique ids |
| merge schedule | `Standing.is_due` | a merge is due by the manifest alone |
| A4, A6 | `Acceptor.proposal_problem` | rounds follow from what was signed; merges only when due |
| merge manifests | `Merger.awaits_own_merge` | a peer first computes a merge itself, then fetches |
| P5 | `Standing.abstains`, `Standing.may_vote` | a rolled-back or lost record casts no vote |
| S3 | `Contributor.offer_problem` | only values trained from the tip |
"""

from swarm.protocol.rounds.machine import CampaignInfo, Parts, Phase, RoundMachine
from swarm.protocol.rounds.policies.rules import Rules
from swarm.protocol.rounds.state import LocalPeer

__all__ = ["CampaignInfo", "LocalPeer", "Parts", "Phase", "RoundMachine", "Rules"]
