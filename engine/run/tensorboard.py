"""Write the TensorBoard file of a run."""

import io
import itertools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import scalar, text

from isoloss.engine.instruments.files import AppendOnlyFile

VERSION = "brain.Event:2"  # version of the format
_numbers = itertools.count()


class EventFile:
    """A new event file in `folder`.

    first_step: step from which on TensorBoard hides events of older files in the folder; 0: all of them.
    """

    # Not torch's SummaryWriter: its thread loses events that a disk refuses, and raises the error in a later call.

    def __init__(self, folder: Path, first_step: int):
        folder.mkdir(parents=True, exist_ok=True)
        # The name that TensorBoard expects, which reads files in the order of the time in their names.
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self.file = AppendOnlyFile(folder / name)
        start = SessionLog(status=SessionLog.START)
        self._write(Event(file_version=VERSION), Event(step=first_step, session_log=start))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write scalars, by tag."""
        self._write(*(_event(step, scalar(tag, value)) for tag, value in values.items()))

    def text(self, step: int, tag: str, markdown: str) -> None:
        """Write a text."""
        self._write(_event(step, text(tag, markdown)))

    def _write(self, *events: Event) -> None:
        records = io.BytesIO()
        writer = RecordWriter(records)
        for event in events:
            event.wall_time = time.time()
            writer.write(event.SerializeToString())
        self.file.append(records.getvalue())


def has_earlier_names(folder: Path) -> bool:
    """Return whether the newest event file in `folder` has the names of earlier releases, train/<key>."""
    files = sorted(folder.glob("events.out.tfevents.*"))
    for event in EventFileLoader(str(files[-1])).Load() if files else ():
        for value in event.summary.value:
            group, slash, _ = value.tag.partition("/")
            if slash and group not in ("eval", "evaluation", "rollouts"):  # those are in both
                return group == "train"
    return False


def _event(step: int, summary: Summary) -> Event:
    return Event(step=step, summary=summary)
