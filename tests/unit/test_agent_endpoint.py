"""The endpoint, as OpenAI's unmodified client and a raw one see it; commands of a shell as agents."""

import contextlib
import json
import queue
import sys
import urllib.error
import urllib.request

import pytest
from support.agents import ROW, TOKENIZER, Model

from isoloss.engine.rl.agents.agents import Agents, Limits
from isoloss.engine.rl.agents.dialogue import Dialogue
from isoloss.engine.rl.agents.endpoint import Endpoint
from isoloss.engine.rl.agents.pool import AgentPool

PROGRAM = """
import json, os, sys
from openai import OpenAI, BadRequestError

client, row = OpenAI(), json.loads(os.environ["ROW"])
messages, texts = list(row["prompt"]), []
assert [model.id for model in client.models.list()] == ["policy"]
for turn in range(3):
    if turn == 1:  # a stream
        pieces = client.chat.completions.create(model="policy", messages=messages, stream=True)
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    else:
        made = client.chat.completions.create(model="policy", messages=messages, temperature=1.0)
        text = made.choices[0].message.content
    texts.append(text)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": str(turn)}]
# The same request as a retry of the client: answered from the record. As a new one: a sibling.
again = client.chat.completions.create(
    model="policy", messages=messages[:-2], extra_headers={"x-stainless-retry-count": "1"}
)
assert again.choices[0].message.content == texts[-1]
client.chat.completions.create(model="policy", messages=messages[:-2])
for wrong in ({"top_p": 0.9}, {"temperature": 0.5}, {"n": 2}, {"seed": 1}):
    try:
        client.chat.completions.create(model="policy", messages=messages, **wrong)
    except BadRequestError as error:
        assert next(iter(wrong)) in error.message
    else:
        sys.exit(f"{wrong} was not refused")
print(f"texts: {texts}")
print(json.dumps([[0, 0.5], [2, 0.25]]))
"""


@contextlib.contextmanager
def served(program, **limits):
    defaults = {"turns": 8, "tokens": 100, "reply": 8, "context": 1000, "timeout": 60.0, "retries": 0, "concurrency": 4}
    model = Model()
    with contextlib.closing(Endpoint(1.0)) as endpoint:
        dialogue, pool = Dialogue(TOKENIZER, {}, "append", None), AgentPool(program, 1, None)
        agents = Agents(pool, dialogue, Limits(**{**defaults, **limits}), 0, endpoint.url)
        with contextlib.closing(agents) as model.agents:
            endpoint.chat = agents.chat
            yield model, endpoint


def played(program, **limits):
    with served(program, **limits) as (model, _):
        model.agents.begin("train.jsonl:1/0/0", ROW, model, {})
        return model.done.get(timeout=120), model


def test_openais_client(tmp_path):
    pytest.importorskip("openai")
    (tmp_path / "program.py").write_text(PROGRAM)
    found, model = played(f"command:{sys.executable} {tmp_path}/program.py")
    assert found.error is None and found.reward == 0.75
    assert [turn.reward for turn in found.turns] == [0.5, 0, 0.25, 0] and len(model.asked) == 4
    assert found.events["repeated"] == 1
    third, sibling = found.turns[2:]
    assert third.prompt_tokens == sibling.prompt_tokens and sibling.completion.id.endswith("/1")


@pytest.mark.parametrize(
    "command, error",
    [
        ("echo no; exit 3", "environment: the command ended with status 3: no"),
        ("echo done", "environment: the command's last line is no reward: 'done'"),
        ("echo NaN", "environment: returned nan: return a finite number, or a list of (turn, number)"),
        ("echo '[[0, 1]]'", "environment: returned a reward of turn 0, and the session has 0 turns, from 0 on"),
    ],
)
def test_commands_that_fail_are_faults(command, error):
    found, _ = played(f"command:{command}")
    assert found.error == error and not found.valid


def post(url, key, body, **headers):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", **headers}
    request = urllib.request.Request(f"{url}/chat/completions", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


def test_keys_bodies_and_ids():
    body = {"messages": [{"role": "user", "content": "go"}]}
    with served("command:sleep 1000", turns=2) as (model, endpoint):
        keys: queue.Queue[str] = queue.Queue()
        begin = model.agents._pool.begin
        model.agents._pool.begin = lambda *given: (keys.put(given[-1]), begin(*given))[1]
        for k in range(2):
            model.agents.begin(f"train.jsonl:1/0/{k}", ROW, model, {})
        one, other = keys.get(timeout=60), keys.get(timeout=60)
        assert one != other
        for key, wanted in (("wrong", "belongs to no session"), ("", "no key")):
            status, error = post(endpoint.url, key, body)
            assert status == 401 and wanted in error["message"]
        assert post(endpoint.url, one, b"{")[1]["message"] == "the body is not JSON"
        assert "`messages`" in post(endpoint.url, one, {})[1]["message"]
        assert (
            "ends with the assistant"
            in post(endpoint.url, one, {"messages": [{"role": "assistant", "content": "x"}]})[1]["message"]
        )
        status, answer = post(endpoint.url, one, {**body, "return_token_ids": True, "logprobs": True, "max_tokens": 1})
        (choice,) = answer["choices"]
        assert status == 200 and answer["prompt_token_ids"] == list(model.asked[0].prompt_tokens)
        assert len(choice["token_ids"]) == 1 and choice["finish_reason"] == "length"
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-1.0]
        assert post(endpoint.url, one, body)[0] == 200
        status, error = post(endpoint.url, one, body)  # the limit is the session's own
        assert status == 400 and error["code"] == "session_over" and error["message"] == "agent.max_turns is reached"
        assert post(endpoint.url, other, body)[0] == 200
        assert [request.id.rsplit("/", 2)[0][-1] for request in model.asked] == ["0", "0", "1"]
