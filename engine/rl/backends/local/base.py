"""A rollout backend without servers: every model in the training processes generates a share of the completions."""

import itertools
import threading
import traceback
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from isoloss.engine.instruments import watchdog
from isoloss.engine.rl.backends.local.continuous_batching import ActiveSequence, Decoder, RowScheduler
from isoloss.engine.rl.backends.local.orders import IDLE_SECONDS, LOOK_SECONDS, Order, OrderLog
from isoloss.engine.rl.backends.local.stop_strings import TokenizerText
from isoloss.engine.rl.backends.protocol import RolloutBackend
from isoloss.engine.rl.trajectory import Completion, Request, Sampling
from isoloss.models.architecture import Architecture
from isoloss.parallel import UserError
from isoloss.parallel.collectives import gather_objects
from isoloss.parallel.rank0 import RankZero


class LocalBackend(RolloutBackend):
    """A `RolloutBackend` without `decoder` and `update_weights`.

    concurrency: largest number of rows that decode together in one model.
    tokenizer_folder: folder of the tokenizer, which is read only if a request has stop strings.
    The constructor is collective over the world.
    """

    def __init__(self, arch: Architecture, concurrency: int, tokenizer_folder: Path):
        self.arch, self.concurrency = arch, concurrency
        self._text = TokenizerText(tokenizer_folder, arch.vocab_size)
        self.rank0 = RankZero(patient=watchdog.patient)
        self._version: int | None = None
        self._log = OrderLog()
        self._rows: list[ActiveSequence] = []  # of this rank's model, left in flight by the last `serve`
        self._paused = self._ending = self._closed = False
        # On rank 0: orders of any thread that are not written yet; what is in flight, and how much of it on each model.
        self._changed = threading.Condition()
        self._inbox: list[Any] = []  # rows and orders
        self._futures: dict[str, Future[Completion]] = {}
        self._model_of: dict[str, int] = {}

    def decoder(self) -> Decoder:
        """Return this rank's model, to decode with its present weights."""
        raise NotImplementedError

    def share(self) -> tuple[int, int]:
        """Return the index of this rank's model and the number of models: by default a model for each rank."""
        return dist.get_rank(), dist.get_world_size()

    def answers(self) -> bool:
        """Return True on the one rank of each model that sends its completions to rank 0."""
        return True

    def agree(self, known: int, busy: bool) -> tuple[int, bool]:
        """Return the largest `known` of the ranks that decode together, and whether any is busy. Collective over
        them."""
        return known, busy

    def _check_weights(self, call: str) -> int:
        """Return the version of the weights. Raises ValueError if there are none; `call` is what asks for them."""
        if self._version is None:
            raise ValueError(f"the model in this process has no weights yet: call update_weights before {call}")
        return self._version

    # ---- requests and orders, from any thread of rank 0 -------------------------------------------------------------

    def submit(self, request: Request, sampling: Sampling) -> Future[Completion]:
        """Implement `RolloutBackend.submit`. The future raises RuntimeError after a failure or `close`.

        Raises UserError for a prompt that is empty or too long and for stop strings without a tokenizer, ValueError
        before the first `update_weights` and for an id that is in flight.
        """
        self._check_weights("generate")
        check_request(request, sampling, self.arch.max_positions)
        if sampling.stop:
            self._text(())
        future: Future[Completion] = Future()
        with self._changed:
            if request.id in self._futures:
                raise ValueError(f"two requests are called {request.id}; they would draw the same random numbers")
            self._futures[request.id] = future
            self._inbox.append(ActiveSequence.start(request, sampling))
            self._changed.notify_all()
        future.add_done_callback(lambda future: self._withdraw(request.id) if future.cancelled() else None)
        return future

    def pause(self) -> None:
        """Implement `RolloutBackend.pause`: `serve` obeys within 0.05 s and a token. Does nothing on ranks but 0."""
        self._order(Order("pause"))

    def resume(self) -> None:
        """Implement `RolloutBackend.resume`. Does nothing on ranks but 0."""
        self._order(Order("resume"))

    def abort(self) -> None:
        """Implement `RolloutBackend.abort`, also while paused: `serve` obeys within 0.05 s and a token. Does nothing on
        ranks but 0."""
        self._order(Order("abort"))

    def _withdraw(self, id: str) -> None:
        with self._changed:
            self._futures.pop(id, None)
            self._inbox.append(Order("drop", ids=(id,)))
            self._changed.notify_all()

    def _order(self, order: Order) -> None:
        if self.rank0.here:
            with self._changed:
                self._inbox.append(order)
                self._changed.notify_all()

    # ---- generation, on every rank ----------------------------------------------------------------------------------

    def serve(self, goal: Future | None) -> None:
        """Implement `RolloutBackend.serve`: `agree` before each token, and an all-gather over the world at the end.

        Each model takes a block of the requests that come together, so that completions of one prompt mostly read it
        together. The completion of a request depends on neither the ranks nor the other requests, beyond rounding.
        Raises RuntimeError on every rank where generation failed on one; ranks that decode together with the failed one
        may wait in their collectives until the time limit of the group.
        """
        version = self._check_weights("serve")
        if goal is not None:
            goal.add_done_callback(lambda _: self._wake())
        failure, self._ending = "", False
        try:
            self._generate(RowScheduler(self.decoder(), self.concurrency, version, self._ended, self._text), goal)
        except Exception:  # the other ranks wait below and have to hear of it
            failure = traceback.format_exc()
            self._end() if self.rank0.here else self._log.send(failure)
        everyone = gather_objects((failure, self._log.known), self.rank0.group)
        self._log.skip(max(known for _, known in everyone))
        for rank, (failure, _) in enumerate(everyone):
            if failure:
                error = RuntimeError(f"generation failed on rank {rank}:\n{failure}")
                self._fail(error)
                raise error

    def _generate(self, rows: RowScheduler, goal: Future | None) -> None:
        rows.add(self._rows)
        self._rows = []
        decoder = rows.decoder
        # Not in inference mode: Megatron keeps the buffer of its gathers, and later passes could not write to it.
        with torch.no_grad():
            while self._follow(rows, goal):
                watchdog.beat()
                rows.step() if rows.busy else decoder.idle()
        self._rows = rows.take_rows()

    def _follow(self, rows: RowScheduler, goal: Future | None) -> bool:
        """Carry out orders. Return True when there is a token to make, False when this `serve` ends."""
        while True:
            if self.rank0.here:
                self._write_orders(goal, LOOK_SECONDS)
            known, busy = self.agree(self._log.look(), rows.busy)
            orders = list(self._log.read(known))
            for order in orders:
                if self._carry_out(order, rows):
                    return False
            if orders:  # the ranks that decode together have other rows now
                continue
            if busy and not self._paused:
                return True
            if self.rank0.here:
                self._wait_for_orders(goal)
            else:
                self._log.wait()

    def _carry_out(self, order: Order, rows: RowScheduler) -> bool:
        """Carry out an order. Return whether it ends this `serve`."""
        if order.what == "submit":
            rows.add(order.rows[self.share()[0]])
        elif order.what == "drop":
            rows.drop(order.ids)
        elif order.what == "abort":
            rows.abort()
        elif order.what in ("pause", "resume"):
            self._paused = order.what == "pause"
        return order.what == "end"

    def _ended(self, row: ActiveSequence) -> None:
        if self.answers():
            completion = row.completion()
            self._deliver(completion) if self.rank0.here else self._log.send(completion)

    # ---- on rank 0, amid `serve` ------------------------------------------------------------------------------------

    def _wait_for_orders(self, goal: Future | None) -> None:
        known = self._log.known
        with watchdog.patient():
            while self._log.known == known:
                with self._changed:
                    if not self._inbox and not (goal and goal.done()):
                        self._changed.wait(IDLE_SECONDS if self._model_of else LOOK_SECONDS)
                self._write_orders(goal, 0.0)

    def _write_orders(self, goal: Future | None, every: float) -> None:
        """Write what threads of rank 0 have asked for, in their order, deliver what other ranks have completed, and
        write the end of this `serve` when it is due.

        every: seconds between two looks for completions of other ranks.
        """
        if self._ending:
            return  # what comes now is of the next `serve`
        with self._changed:
            inbox, self._inbox = self._inbox, []
        for is_row, entries in itertools.groupby(inbox, lambda entry: isinstance(entry, ActiveSequence)):
            for order in [Order("submit", self._divided(list(entries)))] if is_row else entries:
                self._log.write(order)
                for id in order.ids:
                    self._model_of.pop(id, None)
        failed = False
        for result in self._log.results(every):
            if isinstance(result, Completion):
                self._deliver(result)
            else:
                failed = True
        if failed or (goal is not None and goal.done()):
            self._end()

    def _end(self) -> None:
        self._ending = True
        self._log.write(Order("end"))

    def _divided(self, rows: list[ActiveSequence]) -> tuple[tuple[ActiveSequence, ...], ...]:
        """Return a block of neighbours for each model. Sizes differ by at most one; the model with fewest rows in
        flight gets the last block, which is among the largest."""
        count, load = self.share()[1], Counter(self._model_of.values())
        blocks: list[tuple[ActiveSequence, ...]] = [()] * count
        for index, model in enumerate(sorted(range(count), key=lambda model: -load[model])):
            blocks[model] = tuple(rows[index * len(rows) // count : (index + 1) * len(rows) // count])
            self._model_of |= {row.request.id: model for row in blocks[model]}
        return tuple(blocks)

    def _deliver(self, completion: Completion) -> None:
        self._model_of.pop(completion.id, None)
        with self._changed:
            future = self._futures.pop(completion.id, None)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(completion)

    def _fail(self, error: Exception) -> None:
        """Fail what is in flight: futures on rank 0, and the rows that this rank has kept."""
        self._rows = []
        with self._changed:
            futures, self._futures = self._futures, {}
            self._inbox = []
        self._model_of = {}
        for future in futures.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # ---- life -------------------------------------------------------------------------------------------------------

    def weight_version(self) -> int | None:
        """Implement `RolloutBackend.weight_version`. One all-gather over the world."""
        versions = gather_objects(self._version)
        return versions[0] if len(set(versions)) == 1 else None

    def check_health(self) -> None:
        """Implement `RolloutBackend.check_health`: a model in this process lives as long as the process."""

    def take_counts(self) -> dict[str, int]:
        """Implement `RolloutBackend.take_counts`: no counts, for there is no server."""
        return {}

    def close(self) -> None:
        """Implement `RolloutBackend.close`; `submit` and `serve` then raise ValueError."""
        self._version = None
        if not self._closed:
            self._closed = True
            self._fail(RuntimeError("the rollout backend was closed before this request was done"))
            self.rank0.close()


def check_request(request: Request, sampling: Sampling, max_positions: int) -> None:
    """Raise UserError for a prompt that is empty, or too long with its new tokens."""
    length = len(request.prompt_tokens)
    if length == 0:
        raise UserError(f"{request.id}: the prompt has no tokens; delete the row or give it a prompt")
    if length + sampling.max_new_tokens > max_positions:
        raise UserError(
            f"{request.id}: a prompt of {length} tokens and rollout.max_new_tokens={sampling.max_new_tokens} are "
            f"more than the model's max_position_embeddings={max_positions}; shorten the prompt or lower the key"
        )
