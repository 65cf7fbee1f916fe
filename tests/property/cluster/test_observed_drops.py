"""``observe`` foretells ``drop``: of any cluster and any load both plan the same merges."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kunserve.control.cluster.commands import LogObserved
from kunserve.control.cluster.standing import Standing
from kunserve.core.ids import InstanceId
from kunserve.core.place import Place
from kunserve.core.snapshots import TransitionRecord
from kunserve.policy.drop.capacity import group_capacity_blocks
from tests.unit.control.cluster.brain import BLOCKS, Brain

MOST = 6
instances = st.integers(0, MOST - 1)
clusters = st.fixed_dictionaries(
    {
        "num_instances": st.integers(2, MOST),
        "num_ranks": st.dictionaries(instances, st.sampled_from([1, 2]), max_size=2),
        "places": st.dictionaries(
            instances,
            st.builds(Place, st.sampled_from("ab"), st.just(""), st.sampled_from([None, 1e-6])),
        ),
        "place_aware": st.booleans(),
        "min_deep_gain": st.sampled_from([0.0, 0.2]),
        "max_queue_per_gain": st.sampled_from([0.0, 1.0, 10.0]),
        "max_group_size": st.sampled_from([None, 2, 3]),
        "dwell_s": st.sampled_from([0.0, 0.5]),
    }
)
loads = st.fixed_dictionaries(
    {
        "num_running": st.just(9),
        "used_blocks": st.sampled_from([BLOCKS // 2, BLOCKS - 10, BLOCKS]),
        "prompt_tokens": st.sampled_from([0, 200, 400]),
    }
)
shortages = st.fixed_dictionaries(
    {
        "num_running": st.just(9),
        "used_blocks": st.just(BLOCKS),
        "num_waiting": st.just(4),
        "head_of_line_blocks": st.sampled_from([5, 20]),
        "waiting_blocks": st.sampled_from([20, 60, 100, 400]),
    }
)
moves = st.one_of(
    st.tuples(st.just("report"), instances, loads),
    st.tuples(st.just("report"), instances, shortages),
    st.tuples(st.just("cut"), instances, instances),
    st.tuples(st.just("leave"), instances),
    st.tuples(st.just("by hand")),
    st.tuples(st.just("complete")),
    st.tuples(st.just("die"), instances),
)


def play(brain: Brain, move: tuple[Any, ...]) -> None:
    count = len(brain.controller.placement.specs)
    match move:
        case "report", number, load:
            if brain.group_of(number % count).leader == number % count:
                brain.report(number % count, **load)
        case "cut", one, other:
            if one % count != other % count:
                cuts = brain.controller.transitions.cuts
                cuts.found(InstanceId(one % count), InstanceId(other % count), brain.now_s)
        case "leave", number:
            brain.controller.placement.mark(brain.group_id(number % count), Standing.LEAVING)
        case ("by hand",):
            brain.controller.force_drop(None, brain.now_s)
            brain.pass_time()
        case ("complete",):
            brain.complete()
        case "die", number:
            brain.die(number % count)
            brain.start(number % count)


def made(brain: Brain) -> list[str]:
    """Merges that the monitor asked for, in the words of an observed one."""
    begun = brain.controller.transitions.active.values()
    records = [one.record for one in begun if one.record.trigger.startswith("demand")]
    return [_words(record, brain) for record in records]


def _words(record: TransitionRecord, brain: Brain) -> str:
    specs = brain.controller.placement.specs
    capacity = [
        sum(group_capacity_blocks(layout, specs) for layout in layouts)
        for layouts in (record.groups_after, record.groups_before)
    ]
    names = "+".join(str(layout.group_id) for layout in record.groups_before)
    return f"{names} blocks={capacity[0] - capacity[1]} trigger={record.trigger!r}"


def told(brain: Brain) -> list[str]:
    words = [said.text.split(maxsplit=4) for said in brain.said(LogObserved)]
    return [
        f"{groups.removeprefix('groups=')} {blocks} {rest.partition(' memory_free')[0]}"
        for what, groups, _, blocks, rest in words
        if what == "drop"
    ]


@st.composite
def stories(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """What happens before memory is short, and then until it is short in several instances."""
    quiet = [("report", number, draw(loads)) for number in range(MOST)]
    before = draw(st.lists(moves, max_size=6))
    return quiet + before + [("report", number, draw(shortages)) for number in range(3)]


@given(clusters, stories())
def test_the_first_drop_is_the_one_that_would_have_been(
    cluster: dict[str, Any], story: list[tuple[Any, ...]]
) -> None:
    """After it the two clusters are no more alike."""
    real, watched = Brain(policy="drop", **cluster), Brain(policy="observe", **cluster)
    for move in story:
        play(real, move)
        play(watched, move)
        merges = made(real)
        assert told(watched) == merges
        if merges:
            break
