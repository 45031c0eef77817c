"""What is done to a run. Each leaves it going on, or ended with everything that it had started.

A new one is a function of the job and of a source of chance, and a row in ROWS.
"""

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import psutil
from chaos.job import Job
from support.faults.small_disk import filled
from support.runs.disturbed import Strike
from support.runs.phases import LOAD, MOMENTS, STEP
from support.runs.waiting import until

PREEMPTED = 75
OPERATIONS = 120  # on the disk: a save of these models takes 108 to 116, and the deletion of the one before 16 more


@dataclass(frozen=True)
class Row:
    """do: returns what it did where that was up to chance. times: how often in a whole campaign. kinds: of runs, by the
    name of their moments. which: tells it from others of its name."""

    name: str
    do: Callable[[Job, Random], str | None]
    times: int
    kinds: tuple[str, ...]
    which: str = ""


# ---- kills ----------------------------------------------------------------------------------------------------------


def everything(job: Job, _: Random) -> None:
    """As if the machine lost its power, but for what has to end by itself: servers and processes of rewards."""
    job.kill(job.trainers())


def one_rank(job: Job, chance: Random) -> None:
    """The agent starts the ranks again."""
    if ranks := job.ranks():
        job.kill([chance.choice(ranks)])


def ended_or_on(job: Job, stopped: Sequence[psutil.Process] = ()) -> None:
    if not job.alive or not job.trainers():
        job.gone()
        return
    for process in stopped:
        job.let_go(process)
    job.goes_on()


def killed_at(moment: str, whom: Callable[[Job, Random], None], job: Job, chance: Random) -> None:
    """SIGKILL at exactly this moment, of the first or the second time that it comes."""
    first = moment in {each.name for each in LOAD}
    if first and not job.saved():
        running(job)
        until(job.saved, "a checkpoint was there to be loaded", lambda: job.alive)
    if first and job.alive:
        everything(job, chance)
        job.gone()
    stopped = job.strike(Strike(moment, 1 if first else chance.randint(1, 2)))
    assert stopped is not None
    whom(job, chance)
    ended_or_on(job, [stopped])


def killed_any_time(whom: Callable[[Job, Random], None], job: Job, chance: Random) -> str:
    """Also while it starts."""
    if not job.alive:
        job.start()
        seconds = chance.uniform(0, 12)
    else:
        seconds = chance.uniform(0, 1)
    job.leash(5)
    time.sleep(seconds)
    whom(job, chance)
    ended_or_on(job)
    return f"after {seconds:.1f} s"


# ---- signals --------------------------------------------------------------------------------------------------------


def told_to_end(number: signal.Signals, job: Job, chance: Random) -> None:
    """Any time in a step: torchrun, or one of its ranks. It saves, ends, and no step is lost."""
    moments = [each.name for each in MOMENTS[job.kind.moments] if each in STEP]
    stopped = job.strike(Strike(chance.choice(moments)))
    assert stopped is not None
    chance.choice(job.trainers()[:1] if number == signal.SIGTERM else job.ranks()).send_signal(number)
    time.sleep(1)  # for torchrun, which passes SIGTERM on
    job.let_go(stopped)
    job.leash(2)
    status = job.wait()
    assert status == (1 if job.kind.ranks else PREEMPTED), f"status {status}"
    job.gone()
    assert f"told to end by {number.name}: saved {job.saved()[-1]}" in job.said()
    assert job.saved()[-1].name == f"step_{job.done():08d}"


def held_up(whom: Callable[[Job], list[psutil.Process]], job: Job, chance: Random) -> str:
    """SIGSTOP, and SIGCONT a while later."""
    running(job)
    victim, seconds = chance.choice(whom(job)), chance.uniform(1, 4)
    victim.send_signal(signal.SIGSTOP)
    job.leash(3)
    time.sleep(seconds)
    job.let_go(victim)
    job.goes_on()
    return f"{seconds:.1f} s"


def running(job: Job) -> None:
    """It does steps."""
    if not job.alive:
        job.start()
    job.goes_on()


# ---- disks ----------------------------------------------------------------------------------------------------------


def refused(number: int, job: Job, chance: Random) -> str:
    """One operation on the disk fails, in a save or in the deletion of the old ones: that is told, and the next save is
    tried. Few cost nothing and are not told: to make a folder that is there, or a way to copy where another is left."""
    at = chance.randrange(OPERATIONS)
    job.strike(Strike("writing", disk=number, at=at))
    before = job.newest_saved()
    job.leash(4)
    told = lambda: " could not be " in job.said() and os.strerror(number) in job.said()
    until(lambda: told() or job.newest_saved() >= before + 3, "it was told, or cost nothing", lambda: job.alive)
    until(lambda: job.newest_saved() > before, "another step was saved", lambda: job.alive)
    return f"operation {at}{'' if told() else ', which cost nothing'}"


def full(job: Job, _: Random) -> str:
    """No room for two saves in a row, nor for the rows of metrics meanwhile: the run ends, or under torchrun is started
    again and again, until there is."""
    if not job.out.is_mount():
        return "not done: nothing can be mounted here"
    running(job)
    with filled(job.out):
        job.leash(8)
        ends = lambda: "isoloss: error: checkpoint" in job.said() and (job.kind.ranks or not job.alive)
        until(ends, "two saves had failed", lambda: job.alive)
        assert "could not be written (No space left on device" in job.said()
    if not job.kind.ranks:
        assert job.wait() == 2
        job.gone()
    running(job)
    return ""


def slow(job: Job, _: Random) -> None:
    """A save takes seconds; training waits for it before the next one."""
    job.strike(Strike("writing", disk="slow"))
    job.goes_on()


def damaged(harm: Callable[[Path, Random], None], job: Job, chance: Random) -> str:
    """A file of the newest checkpoint, between two starts: the run goes on from the one before."""
    running(job)
    until(lambda: len(job.saved()) >= 2, "two checkpoints were there", lambda: job.alive)
    everything(job, chance)
    job.gone()
    before, newest = job.saved()[-2:]
    file = chance.choice([path for path in sorted(newest.rglob("*")) if path.is_file() and path.stat().st_size])
    harm(file, chance)
    job.start(int(before.name.removeprefix("step_")))
    job.goes_on()
    kept = newest.with_name(f"damaged_{newest.name}")
    assert f"passed over, and kept as {kept}" in job.said() and kept.is_dir()
    return str(file.relative_to(newest))


def truncated(file: Path, chance: Random) -> None:
    with file.open("r+b") as opened:
        opened.truncate(chance.randrange(file.stat().st_size))


def flipped(file: Path, chance: Random) -> None:
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def deleted(file: Path, _: Random) -> None:
    file.unlink()


# ---- servers and rewards --------------------------------------------------------------------------------------------


def server(job: Job, chance: Random) -> None:
    """One of them, if there is one yet, without what watches it."""
    if found := server_processes(job):
        job.kill([chance.choice(found)])


def all_servers(job: Job, _: Random) -> None:
    job.kill(server_processes(job))


def server_processes(job: Job) -> list[psutil.Process]:
    return [process for process in job.having(job.kind.server) if job.kind.server in " ".join(process.cmdline()[1:3])]


def reward_workers(job: Job) -> list[psutil.Process]:
    return job.having("reward/worker.py")


def idle_reward_worker(job: Job, _: Random) -> None:
    """Nothing is asked of it: another one takes its place, and no completion loses its reward."""
    job.kill(reward_workers(job))


def network(trouble: str, job: Job, chance: Random) -> str:
    """Between the trainer and one server, or both, for some seconds."""
    stopped = job.strike(Strike(chance.choice(("amid generation", "before an update of a server")), 1))
    assert stopped is not None
    seconds, urls = chance.uniform(1, 4), chance.sample(job.kind.urls, chance.randint(1, 2))
    files = [job.kind.networks[job.kind.urls.index(url)] / trouble for url in urls]
    for file in files:
        file.touch()
    job.let_go(stopped)
    job.leash(3)
    time.sleep(seconds)
    for file in files:
        file.unlink()
    job.goes_on()
    return f"{len(urls)} of 2 for {seconds:.1f} s"


# ---- all of it ------------------------------------------------------------------------------------------------------


def rows(kind: str) -> list[Row]:
    """All that is done to a run of this kind."""
    return [row for row in ROWS if kind in row.kinds]


def _kills() -> Iterator[Row]:
    """Of the trainer at every moment, and of others where they matter."""
    for kind, moments in MOMENTS.items():
        for each in moments:
            yield Row("kill the trainer", partial(killed_at, each.name, everything), 1, (kind,), each.name)
    yield Row("kill a rank", partial(killed_at, GRADIENTS, one_rank), 1, ("sft",), GRADIENTS)
    for moment in ("amid generation", "weights sent, no version"):
        yield Row("kill the trainer", partial(killed_at, moment, everything), 1, ("sglang",), moment)
        yield Row("kill a server", partial(killed_at, moment, server), 1, (*DOUBLES, "sglang"), moment)
        yield Row("kill all servers", partial(killed_at, moment, all_servers), 1, DOUBLES, moment)
    yield Row("kill rewards", partial(killed_at, "generation", idle_reward_worker), 1, RL, "idle")


ALL, RL, DOUBLES = tuple(MOMENTS), ("grpo", "servers", "ahead"), ("servers", "ahead")
GRADIENTS = "gradients, no step yet"
ROWS = [
    *_kills(),
    Row("kill the trainer", partial(killed_any_time, everything), 4, ALL, "any time"),
    Row("kill a rank", partial(killed_any_time, one_rank), 4, ("sft",), "any time"),
    Row("kill a server", partial(killed_any_time, server), 2, DOUBLES, "any time"),
    Row("kill a server", partial(killed_any_time, server), 1, ("sglang",), "any time"),
    Row("SIGTERM", partial(told_to_end, signal.SIGTERM), 1, (*ALL, "sglang")),
    Row("SIGUSR1", partial(told_to_end, signal.SIGUSR1), 1, ALL),
    Row("SIGSTOP, SIGCONT", partial(held_up, Job.ranks), 1, ALL, "a rank"),
    Row("SIGSTOP, SIGCONT", partial(held_up, server_processes), 1, (*DOUBLES, "sglang"), "a server"),
    Row("SIGSTOP, SIGCONT", partial(held_up, reward_workers), 1, RL, "rewards"),
    Row("damage the newest checkpoint", partial(damaged, truncated), 1, ALL, "a file cut short"),
    Row("damage the newest checkpoint", partial(damaged, flipped), 1, ALL, "a bit flipped"),
    Row("damage the newest checkpoint", partial(damaged, deleted), 1, ALL, "a file deleted"),
    Row("disk refuses", partial(refused, errno.ENOSPC), 1, ALL, "full"),
    Row("disk refuses", partial(refused, errno.EIO), 1, ALL, "broken"),
    Row("disk refuses", partial(refused, errno.EROFS), 1, ALL, "read-only"),
    Row("disk full for a while", full, 1, ALL),
    Row("disk is slow", slow, 1, ALL),
    Row("network in trouble", partial(network, "cut"), 2, DOUBLES, "cut"),
    Row("network in trouble", partial(network, "silent"), 2, DOUBLES, "silent"),
]
