"""One front for several engines: who gets what, and what they say together."""

from musespark.config.sampling import SamplingParams
from musespark.engine.client import EngineOutput, EngineRequest, EngineStats, SpeculationStats
from musespark.engine.messages import Abort, ForgetPrefixes, Outputs, Refused, Shutdown, Submit
from musespark.engine.request import FinishReason
from musespark.executor.replicas import Replicas, join_stats


def submit(name, num_tokens=1, n=1):
    return Submit(EngineRequest(name, (0,) * num_tokens, SamplingParams(n=n)))


def ended(name, index=0):
    output = EngineOutput(name, index, (5,), finish_reason=FinishReason.STOP)
    return Outputs([output], EngineStats())


def test_a_request_goes_where_the_fewest_outputs_run():
    replicas = Replicas(3)
    assert replicas.route(submit("a", n=4)) == [0]
    assert replicas.route(submit("b")) == [1]
    assert replicas.route(submit("c")) == [2]
    assert replicas.route(submit("d")) == [1]
    replicas.join(2, ended("c"))
    assert replicas.route(submit("e")) == [2]
    for index in range(4):
        replicas.join(0, ended("a", index))
    assert replicas.route(submit("f")) == [0]


def test_among_equals_the_one_with_the_shorter_prompts_gets_it():
    replicas = Replicas(2)
    assert replicas.route(submit("long", 100)) == [0]
    assert replicas.route(submit("short", 10)) == [1]
    assert replicas.route(submit("next")) == [1]


def test_what_is_about_a_request_goes_to_its_replica_and_the_rest_to_all():
    replicas = Replicas(2)
    replicas.route(submit("a"))
    replicas.route(submit("b"))
    assert replicas.route(Abort("b")) == [1]
    assert replicas.route(Abort("unknown")) == []
    assert replicas.route(ForgetPrefixes()) == replicas.route(Shutdown()) == [0, 1]


def test_a_refused_request_is_no_load():
    replicas = Replicas(2)
    replicas.route(submit("a", n=3))
    replicas.join(0, Refused("a", "QueueFullError", "full"))
    assert replicas.route(submit("b")) == [0]


def test_statistics_are_joined_field_by_field():
    stats = [
        EngineStats(
            num_running=count,
            kv_cache_usage=count / 10,
            step_seconds=count,
            finished={"stop": count, str(count): 1},
            expert_load={3: [count, 1]},
            speculation=SpeculationStats(verified=[count] * count, draft_seconds=count),
        )
        for count in (1, 3)
    ]
    joined = join_stats(stats)
    assert joined.num_running == 4
    assert joined.kv_cache_usage == 0.2
    assert joined.step_seconds == 2
    assert joined.finished == {"stop": 4, "1": 1, "3": 1}
    assert joined.expert_load == {3: [4, 2]}
    assert joined.speculation == SpeculationStats(verified=[4, 3, 3], draft_seconds=2)
    assert join_stats([EngineStats(), EngineStats()]).speculation is None


def test_a_replica_that_tells_no_expert_load_keeps_its_last_one():
    replicas = Replicas(2)
    replicas.join(0, Outputs([], EngineStats(expert_load={0: [1, 2]})))
    replicas.join(1, Outputs([], EngineStats(expert_load={0: [5, 5]})))
    message = replicas.join(0, Outputs([], EngineStats()))
    assert isinstance(message, Outputs)
    assert message.stats.expert_load == {0: [6, 7]}
