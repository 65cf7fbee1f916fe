"""Knowing prefixes: bounded, never of use to prompts that share nothing, never a longer wait."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kunserve.control.cluster.requests.prefixes import PrefixIndex
from kunserve.core.config import ClusterConfig, SchedulerConfig
from kunserve.core.messages import Submit
from tests.unit.control.cluster.brain import Brain

chains = st.lists(st.integers(0, 2), min_size=1, max_size=6)


def names_of(chain: list[int]) -> tuple[bytes, ...]:
    """A name is all that came before it."""
    return tuple(bytes(chain[:end]) for end in range(1, len(chain) + 1))


@given(st.lists(chains, max_size=60), st.integers(1, 12), chains)
def test_the_index_is_bounded_and_has_no_gaps(added, at_most, asked):
    index = PrefixIndex()
    for chain in added:
        index.add(names_of(chain), at_most)
        assert len(index) <= at_most
        assert index.depth(names_of(chain)) == min(len(chain), at_most)
    names = names_of(asked)
    depth = index.depth(names)
    assert [index.depth((name,)) for name in names] == [1] * depth + [0] * (len(names) - depth)


@st.composite
def happenings(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    one = st.tuples(
        st.sampled_from(["ask", "ask", "report", "token", "time"]),
        st.integers(0, 2),
        st.integers(1, 120),
    )
    return draw(st.lists(one, max_size=30))


def play(brain: Brain, story: list[tuple[str, int, int]], shared: int) -> list[tuple[int, str]]:
    """What is sent to whom. Prompts begin with ``shared`` tokens that all have."""
    sent: list[tuple[int, str]] = []
    at: dict[int, list[str]] = {}
    num = 0
    for what, who, amount in story:
        if what == "ask":
            num += 1
            brain.request(prompt=[1] * shared + [10 * num] * amount)
        elif what == "report":
            brain.report(who, num_running=amount // 40, used_blocks=amount // 2)
        elif what == "token" and at.get(who):
            brain.output(who, at[who].pop(0))
        elif what == "time":
            brain.pass_time(0.1)
        for leader, submit in brain.take(Submit):
            request_id = submit.request.request_id
            sent.append((leader, request_id))
            at.setdefault(leader, []).append(request_id)
        brain.controller.check()
    return sent


def brain_of(is_aware: bool) -> Brain:
    cluster = ClusterConfig(num_instances=3, prefix_aware_dispatch=is_aware)
    scheduler = SchedulerConfig(max_num_batched_tokens=32)
    return Brain(3, cluster=cluster, scheduler=scheduler, policy="recompute")


@settings(max_examples=40)
@given(happenings())
def test_prompts_that_share_nothing_go_where_they_went(story):
    assert play(brain_of(True), story, 0) == play(brain_of(False), story, 0)


@settings(max_examples=40)
@given(happenings(), st.integers(64, 200))
def test_whoever_is_held_back_is_sent_when_leaders_make_tokens(story, shared):
    """No request stays in the backlog when every leader has worked off what it was sent."""
    brain = brain_of(True)
    sent = play(brain, story, shared)
    num_asked = sum(what == "ask" for what, _, _ in story)
    for _ in range(num_asked + 1):
        for leader, request_id in sent:
            if request_id not in {token.request_id for token in brain.tokens}:
                brain.output(leader, request_id)
        for number in range(3):
            brain.report(number)
        sent = [*sent, *((i, s.request.request_id) for i, s in brain.take(Submit))]
        brain.controller.check()
    assert len({request_id for _, request_id in sent}) == num_asked
