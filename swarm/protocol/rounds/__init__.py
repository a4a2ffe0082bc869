"""How peers without a server agree, every round, on one model: the round machine.

One class a role, each built on the one before: `state` (what a peer knows), `adopter` (decided
manifests), `contributor`, `acceptor`, `reducer`, `merger`, `collector` and `convener`,
`takeover`, `forks` (listening, gossip, reforms), `machine` (events in, effects out). `rosters`,
`composition`, `evidence` and `checks` are pure functions on manifests.

Each rule that safety or progress hangs on has a method of its own, which a test can replace to
see the simulator catch it:

| rule | method | what it guards |
|---|---|---|
| P1 | `_persist_promise` | a promise is durable before the READY that carries it |
| P2, A2 | `_vote` | the vote is written, then sent |
| P2 | `_persist_accepted` | the vote is durable |
| A2, X1 | `_is_complete` | nothing is accepted or applied in part |
| A2 | `_may_accept` | all blobs durable, no higher promise, a member |
| A3 | `_on_sync_failed` | what could not be made durable is tried again |
| A1, A2 | `_may_follow` | no higher ballot was promised |
| A5 | `_attempt_problem` | one message cannot use up the ballots of a height |
| P3, C6 | `_voted_otherwise` | second line: one value a ballot, even if its convener forgot |
| P3 | `_burn_ballot` | a convener's ballot is durable before its first message |
| C1, P3 | `_may_use_ballot_zero` | attempt 0 is used once, by rank 0 |
| C2 | `_phase1_required` | higher attempts need a quorum's promises |
| C2, C6 | `_promises` | whose promises count; any quorum, at first without excluded sources |
| C2 | `_choose_accepted` | the vote with the highest ballot is proposed again |
| C3 | `_is_result_of_roster` | results of one roster only |
| C5 | `_has_quorum` | a majority, or half with the tie-breaker |
| C5, A2 | `_electorate` | joiners neither promise nor vote |
| C5 | `_is_chosen` | half decides only after the grace |
| C7 | `_why_step_down`, `_why_deaf` | a campaign without prospect ends |
| K1 | `_why_take_over` | a failed convener is replaced |
| K1 | `_goes_last` | who convened and got no answers lets all others go first |
| P4, X1 | `_may_apply` | every blob durable before the tip moves |
| X1 | `_is_being_fetched` | a duplicate COMMIT does not restart the fetch |
| X2 | `_fetch_is_stuck` | a fetch without progress is dropped |
| H1 | `_may_handle` | votes never cross tips |
| B1 | `_have_spoken` | who boots listens first |
| B1 | `_is_changing_generation` | and until the survivors' chain it found is here |
| B2 | `_was_paused` | who stood still listens again |
| F1 | `_is_better` | the total order of manifests |
| F2 | `_leaves_my_generation`, `_may_leave_generation` | reforms wait until stalled |
| F2 | `_hears_quorum` | no reform while a quorum lives |
| F3 | `_reform_due` | a lost majority is given up |
| F3 | `_new_generation` | generations have unique ids |
| M1 | `_is_due` | a merge is due by the manifest alone |
| A6, M5 | `_proposal_problem` | rounds follow from what others signed; merges exactly when due |
| M6 | `_awaits_own_merge` | compute first, then fetch |
| P5 | `_abstains`, `_may_vote` | a rolled-back or lost record casts no vote |
| S1, S3 | `_offer_problem` | only values trained from the tip |
"""

from swarm.protocol.rounds.machine import CampaignInfo, RoundMachine
from swarm.protocol.rounds.rules import Phase, Rules

__all__ = ["CampaignInfo", "Phase", "RoundMachine", "Rules"]
