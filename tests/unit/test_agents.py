"""Sessions of agents: their record, faults, limits and ends, with a model that is a function of what it reads."""

import contextlib
import os

import pytest
from support.agents import ROW, TOKENIZER, Model

from isoloss.engine.rl.agents.agents import Agents, Limits
from isoloss.engine.rl.agents.dialogue import Dialogue
from isoloss.engine.rl.agents.pool import AgentPool
from isoloss.parallel import UserError

AGENT = """
import asyncio, os, pathlib, time

HERE = pathlib.Path(__file__).parent

async def talk(session, row, turns, then=None):
    messages = list(row["prompt"])
    for number in range(turns):
        reply = await session.chat(messages)
        messages += [reply, {"role": "user", "content": str(number)}]
        if then and number == 0 and not (HERE / session.id.replace("/", "_")).exists():
            (HERE / session.id.replace("/", "_")).touch()
            await then()
    return messages

async def good(session, row):
    await talk(session, row, 3)
    return 1.0

async def events(session, row):
    await talk(session, row, 3)
    return [(0, 0.25), (2, 0.5)]

def fault_once(then):
    async def agent(session, row):
        await talk(session, row, 3, then)
        return 1.0
    return agent

async def refuse():
    raise RuntimeError("sandbox refused")

async def die():
    os._exit(7)

async def sleep():
    await asyncio.sleep(1000)

async def block():
    time.sleep(1000)

faults, dies, sleeps, blocks = map(fault_once, (refuse, die, sleep, block))

async def named_fault(session, row):
    await session.chat(row["prompt"])
    raise session.Fault("no sandbox")

async def silent(session, row):
    await asyncio.sleep(1000)

async def endless(session, row):
    await talk(session, row, 100)
    return 1.0

async def catches(session, row):
    try:
        await talk(session, row, 100)
    except session.Over:
        return 0.5

async def nan(session, row):
    await talk(session, row, 1)
    return float("nan")


async def nothing(session, row):
    await session.chat(row["prompt"])

async def beyond(session, row):
    await session.chat(row["prompt"])
    return [(1, 1.0)]

async def parallel(session, row):
    await asyncio.gather(*(session.chat(row["prompt"]) for _ in range(2)))
    return 1.0

async def leaves(session, row):
    task = asyncio.ensure_future(session.chat([{"role": "user", "content": "never"}]))
    await session.chat(row["prompt"])
    task.cancel()
    return 1.0

async def gives_up(session, row):
    tasks = [asyncio.ensure_future(session.chat(row["prompt"])) for _ in range(2)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await tasks[1]
    await asyncio.sleep(0.1)
    await session.chat(row["prompt"])
    return 1.0

async def diverges(session, row):
    mark = HERE / session.id.replace("/", "_")
    again = mark.exists()
    mark.touch()
    await session.chat([{"role": "user", "content": "b" if again else "a"}])
    if not again:
        raise session.Fault("once")
    return 1.0

async def tells(session, row):
    await session.chat(row["prompt"])
    return [(0, float(session.seed)), (0, float(row["answer"] == "42" and row["table"] == "7"))]
"""


@contextlib.contextmanager
def opened(folder, name, history="append", **limits):
    (folder / "agent.py").write_text(AGENT)
    defaults = {"turns": 8, "tokens": 100, "reply": 8, "context": 1000, "timeout": 60.0, "retries": 1, "concurrency": 4}
    model, dialogue = Model(), Dialogue(TOKENIZER, {}, history, None)
    pool = AgentPool(f"{folder}/agent.py:{name}", 1, None)
    with contextlib.closing(Agents(pool, dialogue, Limits(**{**defaults, **limits}), 0)) as model.agents:
        yield model


def played(folder, name, id="train.jsonl:1/0/0", record=None, **options):
    with opened(folder, name, **options) as model:
        model.agents.begin(id, ROW, model, record or {})
        found = model.done.get(timeout=60)
        if isinstance(found, Exception):
            raise found
        return found, model


def ids(model):
    return [request.id for request in model.asked]


def test_turns_and_their_rewards(tmp_path):
    found, model = played(tmp_path, "events")
    assert found.reward == 0.75 and [turn.reward for turn in found.turns] == [0.25, 0, 0.5] and found.error is None
    assert len(model.asked) == 3 and found.id == "train.jsonl:1/0/0"
    for turn, request in zip(found.turns, model.asked):
        assert tuple(turn.prompt_tokens) == request.prompt_tokens and turn.completion.id == request.id
    first, second, _ = found.turns
    assert tuple(second.prompt_tokens)[: len(first.prompt_tokens)] == first.prompt_tokens
    assert [message["role"] for message in found.events["messages"]] == ["user", "assistant"] * 3
    assert found.events["turns_appended"] + found.events.get("turns_spliced", 0) == 2


@pytest.mark.parametrize("name, why", [("faults", "sandbox refused"), ("dies", "with status 7")])
def test_a_fault_is_tried_again_from_the_record(tmp_path, name, why):
    found, model = played(tmp_path, name)
    assert found.reward == 1.0 and len(found.turns) == 3 and len(set(ids(model))) == len(model.asked) == 3
    assert why in found.events["faults"][0] and found.events["tries"] == 2
    assert all(turn.excluded is None for turn in found.turns)


def test_a_session_that_is_lost_has_no_reward(tmp_path):
    found, model = played(tmp_path, "named_fault")
    assert not found.valid and found.reward != found.reward and found.error == "environment: no sandbox"
    assert len(model.asked) == 1 and found.events["faults"] == ["no sandbox"] * 2


@pytest.mark.parametrize("name", ["sleeps", "blocks"])
def test_time_that_the_policy_can_take_is_a_reward_of_0(tmp_path, name):
    found, _ = played(tmp_path, name, timeout=0.3)
    assert found.reward == 0.0 and found.valid and len(found.turns) == 1


def test_a_session_without_a_call_is_a_fault(tmp_path):
    found, _ = played(tmp_path, "silent", timeout=0.3, retries=0)
    assert found.error is not None and "no call of the model within agent.timeout=0.3" in found.error


def test_limits_end_a_session_and_not_the_run(tmp_path):
    found, model = played(tmp_path, "endless", turns=2)
    assert found.reward == 0.0 and found.error is None and len(model.asked) == 2
    found, model = played(tmp_path, "catches", tokens=7)
    assert found.reward == 0.5 and found.length == 7
    found, model = played(tmp_path, "catches", context=40)
    assert found.reward == 0.5 and len(model.asked) >= 1
    assert all(len(t.prompt_tokens) + len(t.completion.tokens) <= 40 for t in found.turns)


@pytest.mark.parametrize(
    "name, why",
    [
        ("nothing", "returned None"),
        ("nan", "returned nan"),
        ("beyond", "returned a reward of turn 1, and the session has 1 turns"),
    ],
)
def test_what_is_no_reward_is_a_fault(tmp_path, name, why):
    found, _ = played(tmp_path, name, retries=0)
    assert not found.valid and why in found.error


def test_equal_calls_are_siblings(tmp_path):
    found, model = played(tmp_path, "parallel")
    assert len(found.turns) == 2 and sorted(id[-2:] for id in ids(model)) == ["/0", "/1"]
    assert len({id[:-2] for id in ids(model)}) == 1


def test_a_call_that_nobody_waits_for_is_withdrawn(tmp_path):
    found, model = played(tmp_path, "leaves")
    assert found.reward == 1.0 and len(found.turns) == 1 and model.withdrawn == ids(model)[1:]


def test_an_answer_that_nobody_waits_for_does_no_harm(tmp_path):
    found, _ = played(tmp_path, "gives_up", retries=0)
    assert found.reward == 1.0 and len(found.turns) == 3


def test_what_a_further_try_does_not_ask_is_excluded(tmp_path):
    found, model = played(tmp_path, "diverges")
    assert [turn.excluded for turn in found.turns] == [None, "diverged"] and len(model.asked) == 2
    assert found.length == len(found.turns[0].completion.tokens)


def test_a_session_of_a_checkpoint_is_answered_from_its_record(tmp_path):
    whole, _ = played(tmp_path, "good")
    record = {turn.completion.id: (turn.prompt_tokens, turn.completion) for turn in whole.turns[:2]}
    found, model = played(tmp_path, "good", record=record)
    assert found.turns == whole.turns and len(model.asked) == 1


def test_an_agent_gets_its_row_and_a_seed_of_its_own(tmp_path):
    seeds = set()
    for k in range(2):
        found, _ = played(tmp_path, "tells", id=f"train.jsonl:1/0/{k}")
        again, _ = played(tmp_path, "tells", id=f"train.jsonl:1/0/{k}")
        assert found.reward == again.reward
        seeds.add(found.reward)
    assert len(seeds) == 2


def test_nothing_is_left_running(tmp_path):
    with opened(tmp_path, "silent") as model:
        model.agents.begin("train.jsonl:1/0/0", ROW, model, {})
        (worker,) = model.agents._pool.workers
    with pytest.raises(ProcessLookupError):
        os.kill(worker.process.pid, 0)


def test_sessions_are_dealt_to_the_processes(tmp_path):
    (tmp_path / "agent.py").write_text("def agent(session, row): ...")
    pool = AgentPool(f"{tmp_path}/agent.py:agent", 2, None)
    try:
        assert pool.begin("one", {}, 0, None, "") is not pool.begin("two", {}, 0, None, "")
    finally:
        pool.close()


def test_concurrency_is_by_owner(tmp_path):
    with opened(tmp_path, "good", concurrency=1) as model:
        for k in range(3):
            model.agents.begin(f"train.jsonl:1/0/{k}", ROW, model, {})
        assert {model.done.get(timeout=60).id[-1] for _ in range(3)} == {"0", "1", "2"}


def test_programs_that_cannot_be_loaded(tmp_path):
    (tmp_path / "agent.py").write_text("import os\nos._exit(3)")
    with pytest.raises(UserError, match="ended its process with status 3 while it was imported"):
        AgentPool(f"{tmp_path}/agent.py:agent", 1, None)
    (tmp_path / "agent.py").write_text("def other(): ...")
    with pytest.raises(UserError, match=r"environment.program=.*agent.py:agent names no function"):
        AgentPool(f"{tmp_path}/agent.py:agent", 1, None)
    with pytest.raises(UserError, match=r"environment.python=/no/python cannot be started"):
        AgentPool(f"{tmp_path}/agent.py:other", 1, "/no/python")
