"""The front process by its HTTP, with ranks that answer by table; no SDK and no torch."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from starlette.applications import Starlette

from isoloss.recipes import launch
from isoloss.tools.serve import commands, keys, messages
from isoloss.tools.serve.config import ServeConfig
from isoloss.tools.serve.front import Front

KEYS = ("tml-first", "tml-second")


class Ranks:
    """Ranks that note their commands and answer at once."""

    def __init__(self):
        self.commands: list[commands.Command] = []

    async def connect(self) -> dict[str, Any]:
        return {"max_positions": 32, "vocab_size": 100, "stop_token_ids": (2,)}

    async def call(self, command: commands.Command) -> Any:
        self.commands.append(command)
        if isinstance(command, commands.ForwardBackward):
            return commands.Losses(1.5, [np.zeros(len(datum.tokens), np.float32) for datum in command.data], 1)
        if isinstance(command, commands.OptimStep):
            return {"grad_norm": 2.0}
        if isinstance(command, commands.Sample):
            done = (np.array([5]), np.array([-0.5]), "stop")
            return [commands.Sampled([done for _ in request.ids]) for request in command.requests]
        if isinstance(command, commands.SaveWeights):
            for folder in (command.folder, *command.versions.values()):
                Path(folder).mkdir(parents=True, exist_ok=True)
        return None


class Server:
    """A front in this process."""

    def __init__(self, folder: Path, *words: str):
        folder.mkdir(exist_ok=True)
        (folder / "keys").write_text("\n".join(KEYS))
        words = ("preset=tiny", f"serve.api_keys={folder}/keys", f"output_dir={folder}", *words)
        self.config, *_ = launch.compose_config("serve", ServeConfig, words)
        self.ranks = Ranks()
        self.front = Front(self.config, self.ranks)  # pyright: ignore[reportArgumentType]
        self.front.recover()
        self.app = Starlette(routes=self.front.routes())

    async def post(self, path: str, body: Any, key: str = KEYS[0], method: str = "POST") -> tuple[int, Any]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent: list[dict] = []

        async def receive():
            return {"type": "http.request", "body": raw, "more_body": False}

        async def send(message):
            sent.append(message)

        headers = [(b"x-api-key", key.encode())]
        scope = {"type": "http", "method": method, "path": f"/api/v1/{path}", "headers": headers, "query_string": b""}
        await self.app({**scope, "raw_path": b"", "root_path": "", "http_version": "1.1"}, receive, send)
        text = b"".join(message.get("body", b"") for message in sent)
        is_json = any(b"json" in value for _, value in sent[0].get("headers", ()))
        return sent[0]["status"], json.loads(text) if is_json else text

    async def result(self, answer: tuple[int, Any]) -> Any:
        status, future = answer
        assert status == 200, future
        status, body = await self.post("retrieve_future", {"request_id": future["request_id"]})
        assert status == 200, body
        return body

    async def session(self, key: str = KEYS[0]) -> str:
        return (await self.post("create_session", {"sdk_version": "0.38"}, key))[1]["session_id"]

    async def client(self, **lora: Any) -> str:
        session = await self.session()
        asked = {"session_id": session, "model_seq_id": 0, "base_model": "Qwen/Qwen3-8B", "lora_config": lora}
        return (await self.result(await self.post("create_model", asked)))["model_id"]


def run(server: Server, talk) -> Any:
    async def both():
        dispatching = asyncio.create_task(server.front.dispatch())
        try:
            return await asyncio.wait_for(talk(server), 60)
        finally:
            dispatching.cancel()

    return asyncio.run(both())


def losses(model: str, seq: int, tokens: int = 3, **more: Any) -> bytes:
    message = messages.new("ForwardBackwardRequest")
    message.model_id, message.seq_id, message.loss_fn = model, seq, more.get("loss_fn", "cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(3, 3 + tokens, dtype=np.int32).tobytes()
    target = datum.loss_fn_inputs["target_tokens"]
    target.dtype, target.dense = messages.INT64, np.full(tokens, more.get("target", 4), np.int64).tobytes()
    return message.SerializeToString()


def step(model: str, seq: int, **adam: Any) -> dict:
    return {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 0.1, **adam}}


def test_calls_go_to_the_ranks_by_their_numbers_once_each(tmp_path):
    async def talk(server: Server):
        model = await server.client(rank=4, seed=7, train_attn=False)
        third = await server.post("optim_step", step(model, 3, beta1=0.5))
        second = await server.post("forward_backward", losses(model, 2))
        again = await server.post("forward_backward", losses(model, 2))
        first = await server.post("forward_backward", losses(model, 1))
        assert again == second
        answers = [await server.result(each) for each in (first, second, third)]
        assert answers[2] == {"type": "optim_step", "metrics": {"grad_norm": 2.0}}
        output = messages.new("ForwardBackwardOutput")
        output.ParseFromString(answers[0])
        assert dict(output.metrics) == {"loss:sum": 1.5, "micro_batches:max": 1.0}
        return model

    server = Server(tmp_path / "s")
    model = run(server, talk)
    create, *passes, adam = server.ranks.commands
    assert create == commands.CreateModel(model, 4, 7, ("mlp",))
    assert [type(each) for each in passes] == [commands.ForwardBackward] * 2
    assert adam == commands.OptimStep(model, 0.1, 0.5, 0.95, 1e-12, 0.0, 0.0)


def test_a_start_repeats_what_the_saved_state_lacks_and_answers_what_was_promised(tmp_path):
    async def first(server: Server):
        model = await server.client(rank=4)
        for seq in (1, 3):
            await server.result(await server.post("forward_backward", losses(model, seq)))
            await server.result(await server.post("optim_step", step(model, seq + 1)))
        await server.result(await server.post("forward_backward", losses(model, 5)))
        promised = await server.post("optim_step", step(model, 7))  # 6 is on its way
        return model, promised

    async def second(server: Server):
        await server.result(await server.post("forward_backward", losses(model, 6)))
        return await server.result(promised)

    one = Server(tmp_path / "s", "serve.save_every=2")
    model, promised = run(one, first)
    one.front.journal.close()
    two = Server(tmp_path / "s", "serve.save_every=2")
    assert run(two, second)["metrics"] == {"grad_norm": 2.0}
    kinds = [type(each).__name__ for each in two.ranks.commands]
    assert kinds == ["CreateModel", "LoadWeights", "ForwardBackward", "ForwardBackward", "OptimStep"]


def test_a_snapshot_is_sampled_and_a_saved_one_loaded(tmp_path):
    async def talk(server: Server):
        model = await server.client(rank=4)
        session = model.split(":")[0]
        taken = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
        sampler = (await server.result(await server.post("save_weights_for_sampler", taken)))["sampling_session_id"]
        saved = {"model_id": model, "seq_id": 2, "path": "one"}
        path = (await server.result(await server.post("save_weights_for_sampler", saved)))["path"]
        asked = {"session_id": session, "sampling_session_seq_id": 1, "model_path": path}
        other = (await server.post("create_sampling_session", asked))[1]["sampling_session_id"]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [4, 5]}]}
        for name in (sampler, other):
            sample = {"sampling_session_id": name, "seq_id": 0, "prompt": prompt, "num_samples": 2}
            status, future = await server.post("asample", {**sample, "sampling_params": {"max_tokens": 3, "seed": 9}})
            assert status == 200
            assert len(set(future["sample_sequence_ids"])) == 2
            response = messages.new("SampleResponse")
            response.ParseFromString(await server.result((status, future)))
            assert [np.frombuffer(each.tokens, np.int32).tolist() for each in response.sequences] == [[5], [5]]
            assert [each.stop_reason for each in response.sequences] == [0, 0]  # STOP_REASON_STOP
        return model, sampler, path

    server = Server(tmp_path / "s")
    model, sampler, path = run(server, talk)
    snapshot, save, first, load, second = server.ranks.commands[1:]
    assert snapshot == commands.Snapshot(model, sampler)
    assert (load.version, load.folder, load.rank) == (path, save.folder, 4)  # pyright: ignore
    assert [first.version, second.version] == [sampler, path]  # pyright: ignore
    (request,) = first.requests  # pyright: ignore
    assert (request.prompt, request.max_tokens, request.seed, request.stop_token_ids) == ((4, 5), 3, 9, (2,))


def test_what_cannot_be_is_one_line_and_the_server_goes_on(tmp_path):
    async def talk(server: Server):
        model = await server.client(rank=4)
        session = model.split(":")[0]
        base = {"session_id": session, "model_seq_id": 1, "base_model": "Qwen/Qwen3-8B"}
        refused = [
            (401, "none of this server's keys", "client/config", {}, "tml-wrong"),
            (404, "does not exist", "optim_step", step(model, 1), KEYS[1]),
            (404, "does not exist", "get_info", {"model_id": "other"}, KEYS[0]),
            (404, "does not exist", "create_model", {**base, "session_id": "other"}, KEYS[0]),
            (404, "does not exist", "create_model", base, KEYS[1]),
            (404, "does not exist", "load_weights", {"path": "tinker://x/weights/y", "optimizer": True}, KEYS[0]),
            (400, "this server has Qwen/Qwen3-8B", "create_model", {**base, "base_model": "other"}, KEYS[0]),
            (400, "rank=0 must be a number from 1 to", "create_model", {**base, "lora_config": {"rank": 0}}, KEYS[0]),
            (400, "set train_attn or train_mlp", "create_model",
             {**base, "lora_config": {"rank": 4, "train_attn": False, "train_mlp": False}}, KEYS[0]),
            (400, "no JSON", "optim_step", b"{", KEYS[0]),
            (400, "not an object", "optim_step", b"[]", KEYS[0]),
            (400, "seq_id=None", "optim_step", {"model_id": model}, KEYS[0]),
            (400, "must be a name without /", "save_weights", {"model_id": model, "seq_id": 1, "path": "a/b"}, KEYS[0]),
            (400, "protobuf", "forward_backward", b"\xff\xff", KEYS[0]),
            (413, "serve.max_body_bytes", "optim_step", b" " * 2001, KEYS[0]),
            (410, "does not exist", "retrieve_future", {"request_id": "other"}, KEYS[0]),
        ]  # fmt: skip
        for status, line, path, body, key in refused:
            found, answer = await server.post(path, body, key)
            assert (found, line in answer["detail"], "\n" in answer["detail"]) == (status, True, False), (path, answer)
        failed = [
            ("forward_backward", losses(model, 1, tokens=33), "32 positions"),
            ("forward_backward", losses(model, 2, target=100), "none of the model's, 0 to 99"),
            ("optim_step", step(model, 3, beta1="x"), "beta1='x' must be a number"),
            ("optim_step", step(model, 4, momentum=0.9), "adam_params has 'momentum'"),
            ("optim_step", {**step(model, 5), "optimizer_params": {"type": "dimuon"}}, "AdamW alone"),
        ]
        for path, body, line in failed:
            answer = await server.result(await server.post(path, body))
            assert answer["category"] == "user"
            assert line in answer["error"]
        return await server.result(await server.post("optim_step", step(model, 6)))

    server = Server(tmp_path / "s", "serve.max_body_bytes=2000")
    assert run(server, talk)["metrics"] == {"grad_norm": 2.0}
    assert [type(each) for each in server.ranks.commands] == [commands.CreateModel, commands.OptimStep]


def test_a_request_with_which_the_ranks_end_twice_is_refused(tmp_path):
    async def ask(server: Server):
        model = await server.client(rank=4)
        return await server.post("optim_step", step(model, 2))  # 1 is on its way, so nothing begins

    async def wait(server: Server):
        await server.result(await server.post("optim_step", step(model, 1)))
        return await server.result((200, future))

    _, future = run(Server(tmp_path / "s"), ask)
    model = future["model_id"]
    server = Server(tmp_path / "s")
    for _ in range(2):
        server.front.journal.begin(future["request_id"])
    assert "twice: it is refused" in run(server, wait)["error"]
    assert [type(each) for each in server.ranks.commands].count(commands.OptimStep) == 1


def test_keys_are_made_private_and_read_back(tmp_path):
    (key,) = keys.read(None, tmp_path)
    assert keys.read(None, tmp_path) == (key,)
    assert key.startswith("tml-")
    assert (tmp_path / "api_key").stat().st_mode & 0o777 == 0o600
    assert keys.owner_of(key, (key,)) != keys.owner_of("tml-other", ("tml-other",))
    assert keys.owner_of(f"{key}x", (key,)) is None


def test_the_front_imports_no_torch():
    code = "import sys; import isoloss.tools.serve.front, isoloss.tools.serve.__main__; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
