from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.load import GroupLoad, LoadReport
from kunserve.policy.dispatch.round_robin import RoundRobin
from kunserve.policy.drop.static_pipelines import plan_pipelines
from kunserve_lab.world.fake_body import fake_spec


def loads(**capacities: int) -> list[GroupLoad]:
    return [
        GroupLoad(LoadReport(GroupId(int(name[1:])), used_blocks=capacity), capacity)
        for name, capacity in capacities.items()
    ]


def test_requests_are_dealt_out_whatever_the_load() -> None:
    turn, groups = RoundRobin(), loads(g3=10, g5=10, g8=10)
    assert [turn.choose(groups, 10) for _ in range(4)] == [3, 5, 8, 3]
    assert turn.choose(loads(g5=10, g8=10), 1) == 5, "the turn goes on"


def test_a_group_that_can_never_hold_the_request_is_passed_over() -> None:
    turn, groups = RoundRobin(), loads(g3=10, g5=2, g8=10)
    assert [turn.choose(groups, 4) for _ in range(3)] == [3, 8, 3]
    assert turn.choose(groups, 11) is None


def alone(number: int) -> GroupLayout:
    return GroupLayout(GroupId(number), (Stage(InstanceId(number), LayerRange(0, 4)),))


def test_instances_merge_in_the_order_of_their_numbers() -> None:
    specs = {InstanceId(i): fake_spec(InstanceId(i), 4, 48, 2, 192, 16) for i in range(7)}
    layouts = [alone(number) for number in (6, 0, 3, 1, 2, 5, 4)]
    pipelines = plan_pipelines(layouts, specs, 3, first_id=GroupId(10), head_cost_layers=0)
    assert [one.new.group_id for one in pipelines] == [10, 11]
    assert [sorted(one.new.members) for one in pipelines] == [[0, 1, 2], [3, 4, 5]]
    assert plan_pipelines(layouts[:2], specs, 3, first_id=GroupId(0), head_cost_layers=0) == ()


def test_instances_that_do_not_reach_each_other_stand_in_other_pipelines() -> None:
    specs = {InstanceId(i): fake_spec(InstanceId(i), 4, 48, 2, 192, 16) for i in range(5)}
    layouts = [alone(number) for number in range(5)]

    def pairs(*apart: tuple[int, int]) -> list[list[int]]:
        cut = [(InstanceId(one), InstanceId(other)) for one, other in apart]
        pipelines = plan_pipelines(
            layouts, specs, 2, first_id=GroupId(10), head_cost_layers=0, apart=cut
        )
        assert [len(pipeline.old) for pipeline in pipelines] == [2] * len(pipelines)
        return [sorted(pipeline.new.members) for pipeline in pipelines]

    assert pairs() == [[0, 1], [2, 3]]
    assert pairs((0, 1)) == [[0, 2], [1, 3]]
    assert pairs(*((0, other) for other in range(1, 5))) == [[1, 2], [3, 4]]
    assert pairs(*((one, other) for one in range(5) for other in range(one + 1, 5))) == []
