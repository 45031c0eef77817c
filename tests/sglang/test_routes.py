"""Routes in SGLang's answers: a server's own choices reach the sample, and bad routes raise an error of one line."""

import base64
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.models.families import VOCAB
from support.ranks import routes
from support.servers.server_commands import DOUBLE

from isoloss.engine.batching.sample import Sample
from isoloss.engine.rl.backends.servers.server import ServerLost
from isoloss.engine.rl.backends.sglang.routes import with_routes
from isoloss.engine.rl.backends.sglang.server import SGLangServer, request_body
from isoloss.engine.rl.routes import RoutesForm
from isoloss.engine.rl.trajectory import Completion, Request, Sampling
from isoloss.parallel import UserError

# Of three layers, the first dense.
FORM = RoutesForm(3, (1, 2), 4, 2)
SAMPLING = Sampling(5, routes=FORM)
REQUEST = Request("row:1/0/2", (7, 8, 9))
ROWS = np.stack([np.zeros((4, 2)), [[0, 1], [1, 2], [3, 0], [2, 3]], [[3, 2], [2, 1], [1, 0], [0, 3]]], 1)


def answer(rows: np.ndarray | None, finish: str = "length", tokens: int = 2) -> tuple[Completion, dict]:
    made = Completion("row:1/0/2", range(tokens), [-1.0] * tokens, [0] * tokens, finish)
    told = {} if rows is None else {"routed_experts": base64.b64encode(rows.astype("<i4").tobytes()).decode()}
    return made, {"meta_info": told}


def test_rows_are_of_the_layers_with_experts_and_the_last_token_has_none():
    assert request_body(REQUEST, (7, 8, 9), SAMPLING, 2)["routed_experts_start_len"] == 0
    assert "return_routed_experts" not in request_body(REQUEST, (7, 8, 9), Sampling(5), 2)
    found = with_routes(*answer(ROWS), REQUEST, 3, SAMPLING).routes
    assert found is not None and found.dtype == np.int16 and found.shape == (5, 2, 2)
    assert (found[:4] == ROWS[:, 1:]).all() and (found[4] == -1).all()


def test_a_completion_that_goes_on_asks_for_the_rows_that_are_missing():
    first = with_routes(*answer(ROWS), REQUEST, 3, SAMPLING)
    asked = replace(REQUEST, partial=first)
    assert request_body(asked, (7, 8, 9, 0, 1), SAMPLING, 3)["routed_experts_start_len"] == 4
    then = with_routes(*answer(ROWS[:1], tokens=1), asked, 5, SAMPLING)
    joined = first.followed_by(then).routes
    assert joined is not None and len(joined) == 6
    assert (joined[:4] == ROWS[:, 1:]).all() and (joined[4] == ROWS[0, 1:]).all()


def test_an_aborted_answer_may_know_less():
    assert with_routes(*answer(None, "abort"), REQUEST, 3, SAMPLING).routes is None
    found = with_routes(*answer(ROWS[:1], "abort"), REQUEST, 3, SAMPLING).routes
    assert found is not None and (found[0] == ROWS[0, 1:]).all() and (found[1:] == -1).all()


@pytest.mark.parametrize(
    ("rows", "kind", "message"),
    [
        (None, UserError, "without routed_experts: start the servers with --enable-return-routed-experts"),
        (ROWS[:, :2, :1], UserError, r"with 8 routed experts, which are no rows of 3 layers x 2 experts: it serves an"),
        (ROWS[:3], ServerLost, "routed_experts of 3 tokens where 4 were read"),
        (ROWS + 1, ServerLost, "routed experts from 1 to 4, of 4 experts"),
        (ROWS - 2, ServerLost, "routed experts from -2 to 1, of 4 experts"),
    ],
)
def test_what_is_no_routes_is_told(rows, kind, message):
    with pytest.raises(kind, match=message):
        with_routes(*answer(rows), REQUEST, 3, SAMPLING)


def test_text_is_no_routes():
    made, reply = answer(ROWS)
    reply["meta_info"]["routed_experts"] = "no base64!"
    with pytest.raises(ServerLost, match="routed_experts that cannot be read"):
        with_routes(made, reply, REQUEST, 3, SAMPLING)


@pytest.fixture
def moe(start, tiny_hf) -> Iterator[SGLangServer]:
    command = f"{DOUBLE} --model {tiny_hf('qwen3-moe')} --enable-return-routed-experts"
    server = SGLangServer(start(command), 60.0)
    server.set_weight_version(0)
    yield server
    server.close()


def test_the_rows_of_a_server_are_the_experts_that_it_chose(moe, pool, tiny_hf):
    """And of the completion that goes on, each of its tokens has one row."""
    tokens = tuple(torch.randint(VOCAB, (9,), generator=torch.Generator().manual_seed(2)).tolist())
    request = Request("a", tokens)
    sampling = Sampling(6, routes=RoutesForm(2, (0, 1), 6, 3), seed=1)
    first = moe.generate(request, tokens, sampling, 2)
    context = (*tokens, *first.tokens)
    whole = first.followed_by(moe.generate(replace(request, partial=first), context, sampling, 4))
    tokens_T = torch.tensor([*tokens, *whole.tokens])
    assert whole.routes is not None and len(whole.routes) == len(tokens_T) == 15
    sample = Sample(tokens_T, torch.arange(15) >= 9, routes=torch.from_numpy(whole.routes))
    ((live,), (logprobs,)) = pool.run(1, routes.live, tiny_hf("qwen3-moe"), [sample])[0]
    assert (whole.routes[-1] == -1).all() and torch.equal(live[:-1].sort(2).values, sample.routes[:-1].sort(2).values)
    assert np.abs(logprobs[9:].numpy() - np.array(whole.logprobs)).max() <= 1e-5
