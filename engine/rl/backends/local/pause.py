"""Pause, resume and abort of generation in the training processes."""

import threading
import time
import uuid

import torch.distributed as dist

POLL_SECONDS = 0.05  # how often ranks other than 0 look whether to pause or to end


class Gate:
    """Pause, resume and abort, called on rank 0 and obeyed by every rank.

    They travel through the process group's key-value store, not by collectives: ranks take different numbers of steps.
    Collective over the world: one broadcast.
    """

    def __init__(self):
        self._rank = dist.get_rank()
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, src=0)
        self._store = dist.PrefixStore(name[0], dist.distributed_c10d._get_default_store())
        self._changed = threading.Condition()
        self._call = 0  # number of the `generate` under way, or of the last one
        self._paused, self._aborted = False, 0  # whether to wait; the last call to be ended
        self._looked = 0.0
        self._set()
        dist.barrier()  # before anybody looks

    def begin(self) -> None:
        """A new call of generate. On every rank."""
        with self._changed:
            self._call += 1
        self._looked = 0.0

    def open(self) -> bool:
        """Wait while paused; then, or once this call is to be ended, whether to go on."""
        if self._rank == 0:
            with self._changed:
                self._changed.wait_for(lambda: not self._paused or self._aborted == self._call)
                return self._aborted != self._call
        if time.monotonic() - self._looked > POLL_SECONDS:
            self._look()
            while self._paused and self._aborted != self._call:
                time.sleep(POLL_SECONDS)
                self._look()
        return self._aborted != self._call

    def pause(self) -> None:
        self._set(paused=True)

    def resume(self) -> None:
        self._set(paused=False)

    def abort(self) -> None:
        self._set(aborted=self._call)

    def _set(self, paused: bool | None = None, aborted: int | None = None) -> None:
        if self._rank == 0:
            with self._changed:
                self._paused = self._paused if paused is None else paused
                self._aborted = self._aborted if aborted is None else aborted
                self._store.set("state", f"{int(self._paused)} {self._aborted}")
                self._changed.notify_all()

    def _look(self) -> None:
        paused, self._aborted = map(int, self._store.get("state").split())
        self._paused = bool(paused)
        self._looked = time.monotonic()
