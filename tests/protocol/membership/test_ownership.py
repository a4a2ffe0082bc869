from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from swarm.protocol.membership.ownership import assign
from swarm.protocol.values.manifest import turn

PEERS = [f"p{index}" for index in range(8)]

peers = st.lists(st.sampled_from(PEERS), min_size=1, unique=True)
capacities = st.sampled_from([1.0, 1.0, 1.0, 0.5, 2.0, 3.7])
greedy = st.sampled_from([1.0, 1.0, 0.5, 1e-9, 1e6, 1e9])
replicas = st.integers(1, 4)
experts = st.integers(1, 12)
seeds = st.text("ab", max_size=3)


def equal(members):
    return dict.fromkeys(members, 1.0)


def shares(previous, members, contributors, num_experts, owners_per_expert=1, seed="", **more):
    options = {"stale": (), "num_experts": num_experts, "owners_per_expert": owners_per_expert}
    return assign(previous, members, contributors, seed=seed, **options | more)


def owned_experts(assignment, peer):
    return sorted(e for e, owners in assignment.owners.items() if peer in owners)


def loads(assignment, members):
    return {peer: len(owned_experts(assignment, peer)) for peer in members}


def moved(before, after):
    """The number of new (expert, owner) pairs."""
    return sum(len(set(after[e]) - set(before.get(e, ()))) for e in after)


@st.composite
def cases(draw, capacity=capacities):
    """Any previous assignment, even a bad one, with any change of members."""
    num_experts = draw(experts)
    members = {peer: draw(capacity) for peer in draw(peers)}
    previous = {
        expert: tuple(sorted(draw(st.lists(st.sampled_from(PEERS), unique=True, max_size=3))))
        for expert in range(num_experts)
    }
    contributors = draw(st.lists(st.sampled_from(PEERS), unique=True))
    stale = draw(st.lists(st.integers(0, num_experts - 1), unique=True))
    arguments = {
        "stale": stale,
        "silent": draw(st.lists(st.sampled_from(PEERS), unique=True, max_size=2)),
        "on_trial": draw(st.lists(st.sampled_from(PEERS), unique=True)),
        "owners_per_expert": draw(replicas),
        "num_experts": num_experts,
        "seed": draw(seeds),
    }
    return previous, members, contributors, arguments


@given(cases())
def test_every_expert_has_exactly_its_number_of_owners_all_of_them_members(case):
    previous, members, contributors, arguments = case
    owners = assign(previous, members, contributors, **arguments).owners
    assert sorted(owners) == list(range(arguments["num_experts"]))
    for names in owners.values():
        assert len(names) == min(arguments["owners_per_expert"], len(members))
        assert list(names) == sorted(set(names))
        assert set(names) <= set(members)


@given(cases())
def test_an_assignment_fed_back_stays_and_says_nothing(case):
    previous, members, contributors, arguments = case
    once = assign(previous, members, contributors, **arguments)
    twice = assign(once.owners, members, contributors, **arguments)
    assert twice.owners == once.owners
    assert twice.reasons == ()


@given(cases())
def test_the_order_of_the_arguments_does_not_matter(case):
    previous, members, contributors, arguments = case
    mirrored = arguments | {key: arguments[key][::-1] for key in ("stale", "silent")}
    backwards = [dict(reversed(each.items())) for each in (previous, members)]
    assert assign(previous, members, contributors, **arguments) == assign(
        *backwards, contributors[::-1], **mirrored
    )


@given(cases(st.just(1.0)))
def test_with_equal_capacities_the_contributors_loads_differ_by_one_at_most(case):
    previous, members, _, arguments = case
    assignment = assign(previous, members, list(members), **arguments)
    counts = loads(assignment, members).values()
    assert max(counts) - min(counts) <= 1


def limits_of(members, arguments):
    slots = arguments["num_experts"] * min(arguments["owners_per_expert"], len(members))
    fair = ceil(slots / len(members))
    return {peer: fair if peer in arguments["on_trial"] else 2 * fair for peer in members}


@given(cases(greedy))
def test_nobody_owns_more_than_its_limit_while_contributors_have_room(case):
    previous, members, contributors, arguments = case
    assignment = assign(previous, members, contributors, **arguments)
    count, limits = loads(assignment, members), limits_of(members, arguments)
    for greedy_one in members:
        for other in set(contributors) & set(members):
            if count[greedy_one] > limits[greedy_one] and count[other] < limits[other]:
                has = set(owned_experts(assignment, greedy_one))
                assert has <= set(owned_experts(assignment, other))


@given(cases(greedy))
def test_where_all_contribute_no_claim_wins_more_than_the_limit(case):
    previous, members, _, arguments = case
    assignment = assign(previous, members, list(members), **arguments)
    limits = limits_of(members, arguments)
    assert all(count <= limits[peer] for peer, count in loads(assignment, members).items())


@given(cases(greedy), capacities)
def test_a_claim_below_the_limits_means_what_it_meant(case, capacity):
    """If no capacity exceeds its limit, the limits move nothing."""
    previous, members, _, arguments = case
    members = dict.fromkeys(members, capacity)
    arguments["on_trial"] = []
    assignment = assign(previous, members, list(members), **arguments)
    for everybody in (list(members), members):
        tried = {**arguments, "on_trial": everybody}
        assert assign(previous, members, list(members), **tried) == assignment


def test_a_claimed_capacity_wins_the_fair_share_at_first_and_twice_that_later():
    names = ["p0", "p1", "p2"]
    before = shares({}, equal(names), names, 8).owners
    members = {**equal(names), "greedy": 1e6}
    first = shares(before, members, members, 8, on_trial=["greedy"])
    held = "instead of the 8 that its capacity claims"
    assert len(owned_experts(first, "greedy")) == 2
    assert f"held to 2 {held}: the fair share, since it is new" in str(first.reasons)
    later = shares(first.owners, members, members, 8)
    assert len(owned_experts(later, "greedy")) == 4
    assert f"held to 4 {held}: nobody owns more" in str(later.reasons)
    more = {**members, **equal([f"p{number}" for number in range(3, 8)])}
    assert len(owned_experts(shares(later.owners, more, more, 8), "greedy")) == 2
    alone = shares(later.owners, {"greedy": 1e6}, ["greedy"], 8)
    assert len(owned_experts(alone, "greedy")) == 8


@given(cases())
def test_no_single_move_to_a_contributor_would_still_help(case):
    previous, members, contributors, arguments = case
    assignment = assign(previous, members, contributors, **arguments)
    count, limits = loads(assignment, members), limits_of(members, arguments)
    for giver in members:
        for taker in set(contributors) & set(members):
            can_move = set(owned_experts(assignment, giver)) - set(owned_experts(assignment, taker))
            share_after = (count[taker] + 1) / members[taker]
            is_full = count[taker] >= limits[taker]
            assert not can_move or is_full or share_after >= count[giver] / members[giver]


@given(peers, experts, replicas, st.integers(0, 7), seeds)
def test_only_the_lost_peers_experts_move_and_one_more_at_most(names, count, replica, index, seed):
    sizes = (count, replica, seed)
    before = shares({}, equal(names), names, *sizes)
    left = [name for name in names if name != names[index % len(names)]]
    if not left:
        return
    after = shares(before.owners, equal(left), left, *sizes)
    # A lost owner is replaced only while there are other peers to replace it with.
    fewest = count * min(replica, len(left)) - sum(
        len(set(owners) & set(left)) for owners in before.owners.values()
    )
    assert moved(before.owners, after.owners) <= fewest + 1


@given(peers, experts, replicas, seeds)
def test_a_newcomer_gets_its_share_once_it_contributes(names, count, replica, seed):
    sizes = (count, replica, seed)
    everybody = [*names, "newcomer"]
    before = shares({}, equal(names), names, *sizes)
    listed = shares(before.owners, equal(everybody), names, *sizes)
    if replica <= len(names):
        assert listed.owners == before.owners  # listed only: it has no state to train from yet
    after = shares(listed.owners, equal(everybody), everybody, *sizes)
    slots = count * min(replica, len(everybody))
    assert len(owned_experts(after, "newcomer")) >= slots // len(everybody)


@given(peers, experts, replicas, st.integers(0, 7), seeds)
def test_a_peer_that_comes_back_costs_no_more_moves_than_a_stranger(
    names, count, replica, index, seed
):
    sizes = (count, replica, seed)
    lost = names[index % len(names)]
    left = [name for name in names if name != lost]
    if not left:
        return
    before = shares({}, equal(names), names, *sizes).owners
    without = shares(before, equal(left), left, *sizes).owners
    counts = []
    for newcomer in (lost, "stranger"):
        together = [*left, newcomer]
        after = shares(without, equal(together), together, *sizes).owners
        counts.append(moved(without, after))
    # Every peer takes the same number, of any experts.
    assert counts[0] == counts[1]


@given(peers, experts, replicas, seeds)
def test_a_peer_that_comes_back_before_it_was_removed_has_its_experts_still(
    names, count, replica, seed
):
    sizes = (count, replica, seed)
    before = shares({}, equal(names), names, *sizes).owners
    silent = shares(before, equal(names), names[1:], *sizes).owners
    assert shares(silent, equal(names), names, *sizes).owners == before


@given(cases())
def test_a_stale_expert_goes_to_a_contributor_while_there_is_one_without_it(case):
    previous, members, contributors, arguments = case
    assignment = assign(previous, members, contributors, **arguments)
    present = set(contributors) & set(members)
    for expert in arguments["stale"]:
        owners = set(assignment.owners[expert])
        assert owners <= present or present <= owners


@given(cases())
def test_a_silent_peer_owns_nothing_that_a_contributor_could(case):
    previous, members, contributors, arguments = case
    assignment = assign(previous, members, contributors, **arguments)
    present = set(contributors) & set(members)
    for owners in assignment.owners.values():
        if set(owners) & (set(arguments["silent"]) - present):
            assert present <= set(owners)


def test_experts_of_a_silent_member_are_adopted_before_it_is_removed():
    previous = {0: ("a",), 1: ("b",)}
    adopted = shares(previous, equal("ab"), ("a",), 2, silent=("b",))
    assert adopted.owners == {0: ("a",), 1: ("a",)}
    assert adopted.reasons == ("expert 1: peer b is silent, adopted by a, load 2/1",)
    back = shares(adopted.owners, equal("ab"), ("a", "b"), 2, silent=("b",))
    assert len(owned_experts(back, "b")) == 1


def test_shares_follow_the_declared_capacity():
    members = {"big": 3.0, "small": 1.0}
    assignment = shares({}, members, members, 8)
    assert loads(assignment, members) == {"big": 6, "small": 2}


def test_owners_stay_although_they_missed_the_round():
    previous = {0: ("a",), 1: ("b",)}
    assert shares(previous, equal("ab"), ("a",), 2).owners == previous
    moved_on = shares(previous, equal("ab"), ("a",), 2, stale=(1,))
    assert moved_on.owners == {0: ("a",), 1: ("a",)}
    assert moved_on.reasons == ("expert 1: peer b did not renew it, adopted by a, load 2/1",)


def test_the_reason_names_expert_peers_and_load():
    previous = {0: ("a",), 1: ("b",), 2: ("c",)}
    after = shares(previous, equal("ac"), ("a", "c"), 3)
    (adopter,) = after.owners[1]
    assert after.reasons == (f"expert 1: peer b left, adopted by {adopter}, load 2/2",)


def test_without_members_nobody_owns_anything():
    assert shares({}, {}, (), 2, 2).owners == {0: (), 1: ()}


def test_ties_are_broken_by_the_seed_so_no_peer_is_always_favoured():
    first = {shares({}, equal("abc"), "abc", 1, seed=s).owners[0][0] for s in "0123456789"}
    assert first == {"a", "b", "c"}
    assert turn("0/0", "a") != turn("1/0", "a")
