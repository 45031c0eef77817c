"""The proof of `isoloss-serve`: a session of its own client against a real server, and what it says of faults."""

import argparse
import json

import numpy as np
import pytest

from isoloss.parallel import Layout, UserError
from isoloss.tools.prove import __main__ as command
from isoloss.tools.prove.serve import proof, session, wire
from isoloss.tools.prove.serve.connection import UNDISTURBED, Connection, Disturbance, SessionError
from isoloss.tools.prove.serve.on_engine import play_on_engine
from isoloss.tools.prove.serve.player import compare, play
from isoloss.tools.prove.serve.server import Killer, Server
from isoloss.tools.serve.wire import forward_backward_answer

NAME, VOCAB, POSITIONS = "Qwen/Qwen3-8B", 2048, 1024
WORDS = ("preset=tiny", *proof.precise("fp64"), "serve.save_every=2")
STEPS = 1

pytestmark = pytest.mark.xdist_group("serve-proof")


def clients(count: int = 1) -> list[session.Client]:
    return session.clients(count, VOCAB, POSITIONS, steps=STEPS)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(WORDS, tmp_path_factory.mktemp("serve") / "server", again=True) as server:
        yield server


def of_server(server: Server, disturbance: Disturbance = UNDISTURBED, count: int = 1, heard=lambda: None):
    def connect(number: int) -> Connection:
        return Connection(server.url, server.key, disturbance, check=server.check, heard=heard)

    return play(clients(count), NAME, connect, together=True)


@pytest.fixture(scope="module")
def alone(server):
    return of_server(server)


def test_a_session_has_the_numbers_of_a_loop_on_the_engine(alone):
    expected = play_on_engine(WORDS, clients(), alone)
    trained = {label: numbers for label, numbers in expected.items() if "tokens" not in numbers}
    assert compare(alone, trained).unequal == 0
    assert compare(alone, expected).within(1e-12)
    assert len(trained) == 4 * (STEPS + 3) + 1


def test_a_second_client_and_a_disturbed_network_change_no_bit(server, alone):
    disturbed = of_server(server, Disturbance(lost=0.3, doubled=0.3, shuffled=True), count=2)
    found = compare(disturbed, alone)
    assert (found.unequal, found.first) == (0, "")


def test_parts_of_a_call_are_the_call_up_to_rounding(server, alone):
    found = compare(of_server(server, Disturbance(chunk=3)), alone)
    assert found.within(1e-12)


def test_killed_processes_change_no_bit(server, alone):
    killer = Killer(server, [20], 0, ["all"])
    found = compare(of_server(server, heard=killer.heard), alone)
    assert (found.unequal, found.first, killer.kills()) == (0, "", 1)
    assert not server.repeated_otherwise()


def test_every_client_has_data_and_shapes_of_its_own_and_the_same_each_time():
    first, second = clients(2)
    tokens = [[datum.tokens for datum in client.requests[0][1].data] for client in (first, second, *clients(1))]
    assert tokens[0] != tokens[1]
    assert tokens[0] == tokens[2]
    assert first.shape != second.shape


def test_the_parts_of_a_call_are_put_together():
    parts = [([-1.0, -2.0], 1.5), ([-4.0], 2.5)]
    answers = [forward_backward_answer([np.array(row, np.float32)], {"loss:sum": loss}) for row, loss in parts]
    found = wire.call_numbers(answers)
    assert (float(found["loss"]), found["logprobs"].tolist()) == (4.0, [-1.0, -2.0, -4.0])


def test_two_answers_to_one_request_end_the_session():
    class Forgetful(Connection):
        asked = 0

        def _send(self, path, body, headers):
            self.asked += 1
            return 200, json.dumps({"request_id": self.asked}).encode()

    for disturbance in (Disturbance(doubled=1.0), Disturbance(lost=1.0)):
        with pytest.raises(SessionError, match="optim_step: a request that was sent twice got two answers"):
            Forgetful("", "", disturbance).post("optim_step", {})


def one(loss: float = -4.0, logprob: float = -1.5, token: int = 7) -> dict:
    numbers = {"loss": np.array(loss), "logprobs": np.array([-2.0, logprob], np.float32)}
    return {"call": numbers, "completions": {"tokens": np.array([5, token])}}


STEP_OF_FP32 = float(np.spacing(np.float32(1.5)))


@pytest.mark.parametrize(
    ("found", "unequal", "within"),
    [
        (one(), 0, True),
        (one(loss=-4.0 * (1 + 1e-13)), 1, True),
        (one(loss=-4.0 * (1 + 1e-11)), 1, False),
        (one(loss=float("nan")), 1, False),
        (one(logprob=-1.5 - STEP_OF_FP32), 1, True),
        (one(logprob=-1.5 - 2 * STEP_OF_FP32), 1, False),
        (one(token=8), 1, False),
        ({**one(), "other": {"loss": np.array(1.0)}}, 0, True),
        ({"call": one()["call"]}, 2, False),
    ],
)
def test_two_records_agree_in_bits_up_to_rounding_or_not(found, unequal, within):
    against = compare(found, one())
    assert (against.values, against.unequal, against.within(1e-12)) == (5, unequal, within)
    assert (against.first == "") == (unequal == 0)


def test_the_certificate_says_which_row_failed(tmp_path, capsys):
    good, bad = compare(one(), one()), compare(one(loss=1.0), one())
    rows = [
        proof.Row("a", True, good, True),
        proof.Row("b", False, bad, False),
        proof.Row("c", True, None, False, "optim_step: 500"),
    ]
    arguments = argparse.Namespace(out=tmp_path, precision="fp64", seed=None, overrides=[])
    assert proof.report(rows, arguments) == 1
    assert json.loads((tmp_path / "proof.json").read_text())["proved"] is False
    lines = [proof.line(row).split(maxsplit=2) for row in rows]
    assert [each[:2] for each in lines] == [["pass", "a"], ["FAIL", "b"], ["FAIL", "c"]]
    assert lines[0][2] == "5 numbers equal in bits"
    assert lines[1][2] == "loss 1.2e+00  norm 0.0e+00  log-probability 0.0e+00  1 of 5 numbers differ, first at call"
    assert lines[2][2] == "optim_step: 500"
    assert proof.report(rows[:1], arguments) == 0
    assert "proved: 1 of 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--kills", "2"], "--kills 2 is of the proof of isoloss-serve: add --serve"),
        (["--serve", "--loss", "clip"], "--loss clip is of the proof of a step"),
        (["--serve", "--layouts", "tp2,tp5"], "tp"),
        (["--serve", "optim.lr=1"], "optim.lr=1.0 is a key of runs"),
    ],
)
def test_a_mistake_is_one_line_and_no_server_starts(words, says, capsys):
    assert command.main(words) == 2
    assert says in capsys.readouterr().err


def test_a_layout_of_experts_has_the_ranks_that_they_need():
    assert [str(proof.whole(Layout.parse(text))) for text in ("ep2", "tp2", "tp2+ep2")] == ["ep2+dp2", "tp2", "tp2+ep2"]


def test_a_server_that_cannot_be_is_a_mistake_and_one_that_ended_an_end_of_the_session(tmp_path):
    with pytest.raises(UserError, match=r"serve\.ranks"):
        run_out(Server(["preset=tiny", "serve.ranks=0"], tmp_path / "a", again=True))
    ended = Server(["preset=tiny"], tmp_path / "b")
    ended.kill("all", None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(SessionError, match="the server ended with status"):
        run_out(ended)


def run_out(server: Server) -> None:
    with server:
        server._helper.wait(60)
        server.check()


@pytest.mark.slow
def test_the_proof_of_the_shipped_model(tmp_path):
    assert command.main(["--serve", "--out", str(tmp_path)]) == 0
