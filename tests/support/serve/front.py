"""The front process of a server in this process, by its HTTP, with ranks that answer by table; no SDK and no torch."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np

from isoloss.recipes import launch
from isoloss.tools.serve import commands, messages
from isoloss.tools.serve.config import ServeConfig
from isoloss.tools.serve.front.app import app_of
from isoloss.tools.serve.front.dispatch import Dispatcher
from isoloss.tools.serve.front.state import State

KEYS = ("tml-first", "tml-second")


class Ranks:
    """Ranks that note their commands and answer at once."""

    def __init__(self):
        self.commands: list[commands.Command] = []
        self.loss = 1.5
        self.slow = asyncio.Event()  # completions wait for it
        self.slow.set()

    async def connect(self) -> dict[str, Any]:
        return {"max_positions": 32, "vocab_size": 100, "stop_token_ids": (2,)}

    async def call(self, command: commands.Command) -> Any:
        self.commands.append(command)
        if isinstance(command, commands.ForwardBackward):
            return commands.Losses(self.loss, [np.zeros(len(datum.tokens), np.float32) for datum in command.data], 1)
        if isinstance(command, commands.OptimStep):
            return {"grad_norm": 2.0}
        if isinstance(command, commands.Sample):
            await self.slow.wait()
            return [(np.array([5]), np.array([-0.5]), "stop") for _ in command.request.ids]
        if isinstance(command, commands.Score):
            length = len(command.prompt)
            position = np.arange(length, dtype=np.float32)
            top = np.tile(position[:, None], command.top)
            return commands.Scores(-position, top.astype(np.int64), -top)
        if isinstance(command, commands.SaveWeights | commands.SaveVersion | commands.ExportAdapter):
            Path(command.folder).mkdir(parents=True)
            (Path(command.folder) / "weights").write_text("12345")
        return None


class Server:
    """A front in this process."""

    def __init__(self, folder: Path, *words: str):
        folder.mkdir(exist_ok=True)
        (folder / "keys").write_text("\n".join(KEYS))
        words = ("preset=tiny", f"serve.api_keys={folder}/keys", f"output_dir={folder}", *words)
        self.config, *_ = launch.compose_config("serve", ServeConfig, words)
        self.ranks = Ranks()
        self.state = State(self.config, self.ranks)  # pyright: ignore[reportArgumentType]
        self.state.recover()
        self.dispatcher = Dispatcher(self.state)
        self.app = app_of(self.state, self.dispatcher)

    async def post(
        self, path: str, body: Any, key: str = KEYS[0], method: str = "POST", **headers: str
    ) -> tuple[int, Any]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent: list[dict] = []

        left = [raw]

        async def receive():
            if not left:
                await asyncio.Event().wait()  # the client stays
            return {"type": "http.request", "body": left.pop(), "more_body": False}

        async def send(message):
            sent.append(message)

        named = {"x-api-key": key, **{name.replace("_", "-"): value for name, value in headers.items()}}
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "method": method,
            "path": path if path.startswith("/") else f"/api/v1/{path}",
            "headers": [(name.encode(), value.encode()) for name, value in named.items()],
            "query_string": query.encode(),
            "server": ("server", 80),
            "scheme": "http",
        }
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

    async def saved(self, model: str, seq: int, name: str, kind: str = "save_weights", **more: Any) -> str:
        asked = {"model_id": model, "seq_id": seq, "path": name, **more}
        answer = await self.result(await self.post(kind, asked))
        assert "path" in answer, answer
        return answer["path"]

    async def snapshot(self, model: str, seq: int, number: int, **more: Any) -> str:
        asked = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": number, **more}
        return (await self.result(await self.post("save_weights_for_sampler", asked)))["sampling_session_id"]


def run(server: Server, talk) -> Any:
    async def both():
        dispatching = asyncio.create_task(server.dispatcher.run())
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


def sample(sampler: str, seq: int = 0, **more: Any) -> dict:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [4, 5]}, {"tokens": [6]}]}
    return {"sampling_session_id": sampler, "seq_id": seq, "prompt": prompt, **more}
