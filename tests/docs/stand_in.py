"""In the place of a cluster's commands: by the name that it is called with, it records the call and does what matters.

srun and sbatch refuse options that they do not have, and run their command with the variables of a job. torchrun trains
when there is a server for every URL of rollout.servers. A server serves until it is killed. Runs without isoloss.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

NAMES = (
    "docker", "enroot", "hf", "pip", "python", "python3", "sbatch", "scontrol", "srun", "tail", "tensorboard",
    "torchrun",
)  # fmt: skip
RECORD = Path(os.environ["RECORD"])
WAIT = 60  # seconds that say that something hangs
SLURM = ("--nodes", "--ntasks-per-node", "--gpus-per-node", "--nodelist")
PYXIS = ("--container-image", "--container-mounts", "--container-workdir")


def calls() -> list[dict]:
    return [json.loads(line) for line in RECORD.read_text().splitlines()] if RECORD.exists() else []


def record(name: str, arguments: list[str], **more: object) -> None:
    call = {"name": name, "arguments": arguments, "pid": os.getpid(), "image": os.environ.get("IMAGE_OF_TASK"), **more}
    call["gpus"] = os.environ.get("CUDA_VISIBLE_DEVICES")
    with RECORD.open("a") as file:
        file.write(json.dumps(call) + "\n")


def parsed(name: str, options: tuple[str, ...], flags: tuple[str, ...] = ()) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog=name, allow_abbrev=False)
    for option in options:
        parser.add_argument(option)
    for flag in flags:
        parser.add_argument(flag, action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if not arguments.command:
        parser.error("no command")
    return arguments, arguments.command


def srun() -> int:
    arguments, command = parsed("srun", SLURM + PYXIS, ("--pty", "--overlap"))
    record("srun", sys.argv[1:], options=vars(arguments))
    image = {"IMAGE_OF_TASK": arguments.container_image} if arguments.container_image else {}
    if command[0] == "bash":
        return 0
    task = subprocess.Popen(command, env=os.environ | image, start_new_session=True)
    signal.signal(signal.SIGTERM, lambda *_: task.terminate())
    status = task.wait()
    return status if status >= 0 else 128 - status


def sbatch() -> int:
    arguments, command = parsed("sbatch", SLURM, ("--requeue",))
    record("sbatch", sys.argv[1:], options=vars(arguments))
    nodes = [f"n{k}" for k in range(int(arguments.nodes))]
    job = {"SLURM_JOB_NODELIST": ",".join(nodes), "SLURM_NNODES": str(len(nodes)), "SLURM_JOB_ID": "7"}
    return subprocess.run(["bash", *command], env=os.environ | job).returncode


def torchrun() -> int:
    deadline = time.monotonic() + WAIT
    urls = re.findall(r"http://[^,\]]*:(\d+)", next((a for a in sys.argv if a.startswith("rollout.servers=")), ""))
    while True:
        known = calls()
        last = max((k for k, call in enumerate(known) if call["name"] == "torchrun"), default=-1)
        ports = {call["arguments"][call["arguments"].index("--port") + 1] for call in known[last + 1 :]
                 if call["name"] == "python" and "sglang.launch_server" in call["arguments"]}  # fmt: skip
        if ports == set(urls):
            record("torchrun", sys.argv[1:], train=True)
            return 0
        if time.monotonic() > deadline or not ports <= set(urls):
            print(f"rollout.servers has ports {sorted(set(urls))}, and servers have {sorted(ports)}", file=sys.stderr)
            return 1
        time.sleep(0.05)


def main() -> int:
    name = Path(sys.argv[0]).name
    if name in ("srun", "sbatch", "torchrun"):
        return {"srun": srun, "sbatch": sbatch, "torchrun": torchrun}[name]()
    record(name, sys.argv[1:])
    if name == "scontrol":
        print(*os.environ["SLURM_JOB_NODELIST"].split(","), sep="\n")
    elif name == "python3" and sys.argv[1:3] == ["-m", "venv"]:
        folder = Path(sys.argv[3]) / "bin"
        folder.mkdir(parents=True)
        (folder / "pip").symlink_to(sys.argv[0])
    elif "sglang.launch_server" in sys.argv:
        time.sleep(WAIT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
