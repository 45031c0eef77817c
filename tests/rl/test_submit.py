"""Requests come one at a time, from any thread, while others are generated; each is as if it had come alone."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from threading import Timer
from types import SimpleNamespace

import pytest
import torch
from support.models.families import tensors_of
from support.ranks import joining

from isoloss.engine.rl.backends.local.orders import OrderLog
from isoloss.engine.rl.backends.local.transformers_backend import TransformersBackend
from isoloss.engine.rl.backends.protocol import all_done
from isoloss.engine.rl.trajectory import Completion, Request, Sampling

SAMPLING = Sampling(max_new_tokens=20, seed=3)
WARM, NUCLEUS = replace(SAMPLING, temperature=0.6), replace(SAMPLING, top_p=0.5, seed=4)
FEW = replace(SAMPLING, top_k=2, stop_token_ids=tuple(range(0, 96, 7)))
REQUESTS = [Request(f"{k}", tuple(range(1, 4 + 3 * k))) for k in range(6)]


@pytest.fixture
def backend(tiny_hf, one_rank) -> Iterator[TransformersBackend]:
    made = TransformersBackend(tiny_hf("llama"), torch.float64, torch.device("cpu"), 4)
    made.update_weights([[(name, tensor.double()) for name, tensor in tensors_of(tiny_hf("llama")).items()]], 1)
    yield made
    made.close()


def alone(backend: TransformersBackend, sampling: Sequence[Sampling]) -> list[Completion]:
    return [backend.generate([request], each)[0] for request, each in zip(REQUESTS, sampling, strict=True)]


def test_later_requests_join_and_nothing_depends_on_who_else_is_there(backend):
    """Each has a sampling of its own, and draws the tokens it draws alone. Each of the first three that ends submits
    one."""
    sampling = [SAMPLING, replace(WARM, max_new_tokens=2), NUCLEUS, replace(SAMPLING, max_new_tokens=3), FEW, NUCLEUS]
    sampling[5] = replace(FEW, temperature=0.6, top_p=0.9, top_k=5, seed=9, stop_token_ids=())
    wanted = alone(backend, sampling)
    goal: Future[None] = Future()
    done: list[Completion] = []
    later = list(zip(REQUESTS, sampling))[3:]

    def ended(future: Future[Completion]) -> None:
        done.append(future.result())
        if later:
            thread = threading.Thread(target=lambda: submit(*later.pop(0)))
            thread.start()
            thread.join()
        if len(done) == len(REQUESTS):
            goal.set_result(None)

    def submit(request: Request, sampling: Sampling) -> None:
        backend.submit(request, sampling).add_done_callback(ended)

    for request, each in zip(REQUESTS[:3], sampling):
        submit(request, each)
    backend.serve(goal)
    assert done[0].id == "1" and sorted(each.id for each in done) == [r.id for r in REQUESTS]
    for found, other in zip(sorted(done, key=lambda each: each.id), wanted, strict=True):
        assert (found.tokens, found.finish) == (other.tokens, other.finish)
        assert tuple(found.logprobs) == pytest.approx(tuple(other.logprobs), abs=1e-6)


def test_what_is_left_goes_on_in_the_next_serve(backend):
    """With the tokens that it had."""
    long, short = REQUESTS[0], REQUESTS[1]
    (wanted,) = backend.generate([long], SAMPLING)
    left = backend.submit(long, SAMPLING)
    backend.serve(backend.submit(short, replace(SAMPLING, max_new_tokens=4)))
    assert not left.done()
    backend._version = 2
    backend.serve(left)
    assert left.result().tokens == wanted.tokens and left.result().versions == (1,) * 4 + (2,) * 16


def test_a_request_that_is_withdrawn_is_generated_no_more(backend):
    short, long = (
        backend.submit(REQUESTS[0], replace(SAMPLING, max_new_tokens=2)),
        backend.submit(REQUESTS[1], SAMPLING),
    )
    short.add_done_callback(lambda _: long.cancel())
    backend.serve(all_done([short, long]))
    with pytest.raises(CancelledError):
        long.result(0)
    last = backend.submit(REQUESTS[1], SAMPLING)  # its id is free again
    backend.serve(last)
    assert len(last.result().tokens) == 20 and not backend._rows and not backend._model_of


def test_a_failure_reaches_every_future(backend):
    futures = [backend.submit(request, SAMPLING) for request in REQUESTS]
    backend.model.base_model.forward = None
    with pytest.raises(RuntimeError, match="generation failed on rank 0"):
        backend.serve(all_done(futures))
    for future in futures:
        with pytest.raises(RuntimeError, match="generation failed on rank 0"):
            future.result(0)


def test_a_failure_forgets_rows_that_a_rank_has_kept(backend):
    """A rank that did not fail itself would generate them once more when they are submitted again."""
    left = backend.submit(REQUESTS[0], SAMPLING)
    backend.serve(backend.submit(REQUESTS[1], replace(SAMPLING, max_new_tokens=4)))
    assert backend._rows
    backend._fail(RuntimeError("another rank failed"))
    with pytest.raises(RuntimeError, match="another rank failed"):
        left.result(0)
    (once,) = backend.generate([REQUESTS[0]], SAMPLING)
    assert len(once.tokens) == 20 and not backend._rows


def test_a_rank_that_has_read_ahead_waits_for_an_order_that_it_has_not_read():
    """Ranks that decode together read up to the largest number that one of them knows."""
    written = {"order/0", "order/1"}
    log = object.__new__(OrderLog)
    log._rank, log._looked, log.known, log._read = 1, 0.0, 1, 2
    log._store = SimpleNamespace(check=lambda keys: {*keys} <= written)
    later = Timer(0.1, written.add, ["order/2"])
    later.start()
    log.wait()
    later.join()
    assert log.known == 3


def test_a_backend_that_is_closed_fails_what_is_in_flight(backend):
    future = backend.submit(REQUESTS[0], SAMPLING)
    backend.close()
    with pytest.raises(RuntimeError, match="closed before this request was done"):
        future.result(0)


@pytest.mark.parametrize(("parallel", "kind"), [({}, "transformers"), ({"pp": 2}, "megatron")], ids=str)
def test_requests_of_rank_0_reach_ranks_that_are_in_the_middle_of_others(parallel, kind, tiny_hf, pool):
    """Nobody hangs, and each request is as if it had come alone."""
    found, _ = pool.run(2, joining.joined, tiny_hf("llama"), REQUESTS, SAMPLING, parallel, kind)
    for here, there in zip(found.joined, found.alone, strict=True):
        assert (here.id, here.tokens, here.finish) == (there.id, there.tokens, there.finish)
