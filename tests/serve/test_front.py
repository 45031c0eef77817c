"""The front process by its HTTP, with ranks that answer by table; no SDK and no torch."""

import asyncio
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pyrage
from support.serve.front import KEYS, Server, losses, run, sample, step

from isoloss.tools.serve import commands, messages
from isoloss.tools.serve.front import housekeeping, keys
from isoloss.tools.serve.front.__main__ import main


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
    assert create == commands.CreateModel(model, 4, 7, ("mlp", "lm_head"))
    assert [type(each) for each in passes] == [commands.ForwardBackward] * 2
    assert adam == commands.OptimStep(model, 0.1, 0.5, 0.95, 1e-12, 0.0, 0.0)


def test_requests_that_are_sent_again_leave_nothing(tmp_path):
    async def talk(server: Server):
        model = await server.client(rank=4)
        for _ in range(3):
            done = await server.result(await server.post("optim_step", step(model, 1)))
            assert done["metrics"] == {"grad_norm": 2.0}

    server = Server(tmp_path / "s")
    run(server, talk)
    assert [type(each) for each in server.ranks.commands].count(commands.OptimStep) == 1
    assert len(server.state.order) == 0


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
    one.state.journal.close()
    two = Server(tmp_path / "s", "serve.save_every=2")
    assert run(two, second)["metrics"] == {"grad_norm": 2.0}
    kinds = [type(each).__name__ for each in two.ranks.commands]
    assert kinds == ["CreateModel", "LoadWeights", "ForwardBackward", "ForwardBackward", "OptimStep"]


def test_a_start_does_not_load_again_what_a_path_has_by_now(tmp_path):
    async def first(server: Server):
        source, model = await server.client(rank=4), await server.client(rank=4)
        path = await server.saved(source, 1, "one")
        load = {"model_id": model, "seq_id": 1, "path": path, "optimizer": True}
        assert "error" not in await server.result(await server.post("load_weights", load))
        await server.saved(source, 2, "one", overwrite=True)
        return source, model

    async def second(server: Server):
        return await server.result(await server.post("optim_step", step(model, 2)))

    one = Server(tmp_path / "s")
    _, model = run(one, first)
    one.state.journal.close()
    two = Server(tmp_path / "s")
    assert "error" not in run(two, second)
    loads = [each for each in two.ranks.commands if isinstance(each, commands.LoadWeights)]
    assert [(each.model_id, "states" in each.folder) for each in loads] == [(model, True)]


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
    request = first.request  # pyright: ignore
    assert (request.prompt, request.max_tokens, request.seed, request.stop_token_ids) == ((4, 5), 3, 9, (2,))


def test_what_cannot_be_is_one_line_and_the_server_goes_on(tmp_path):
    async def talk(server: Server):
        model, other = await server.client(rank=4), await server.client(rank=4)
        saved = await server.saved(other, 1, "one")
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
            (400, "set train_attn, train_mlp or train_unembed", "create_model",
             {**base, "lora_config": {"rank": 4, "train_attn": False, "train_mlp": False, "train_unembed": False}},
             KEYS[0]),
            (400, "lora_config.alpha=32 is not supported", "create_model", {**base, "lora_config": {"alpha": 32}},
             KEYS[0]),
            (400, "optimizer_config.type='dimuon'", "create_model", {**base, "optimizer_config": {"type": "dimuon"}},
             KEYS[0]),
            (400, "no JSON", "optim_step", b"{", KEYS[0]),
            (400, "not an object", "optim_step", b"[]", KEYS[0]),
            (400, "seq_id=None", "optim_step", {"model_id": model}, KEYS[0]),
            (400, "seq_id=0 must be", "optim_step", step(model, 0), KEYS[0]),
            (400, "protobuf", "forward_backward", b"\xff\xff", KEYS[0]),
            (413, "serve.max_body_bytes", "optim_step", b" " * 2001, KEYS[0]),
            (410, "does not exist", "retrieve_future", {"request_id": "other"}, KEYS[0]),
            (404, "does not exist", "asample", sample("other"), KEYS[0]),
            (400, "num_samples=9 is more than 8", "asample", sample("other", num_samples=9), KEYS[0]),
            (400, "chunks.0.type='image'", "asample", sample("other", prompt={"chunks": [{"type": "image"}]}), KEYS[0]),
            (400, "prompt_alt_tokens_k=2", "asample", sample("other", prompt_alt_tokens_k=2), KEYS[0]),
            (400, "sampling_params.min_p=0.1 is not supported", "asample",
             sample("other", sampling_params={"min_p": 0.1}), KEYS[0]),
        ]  # fmt: skip
        for status, line, path, body, key in refused:
            found, answer = await server.post(path, body, key)
            assert (found, line in answer["detail"], "\n" in answer["detail"]) == (status, True, False), (path, answer)
        failed = [
            ("forward_backward", losses(model, 1, tokens=33), "32 positions"),
            ("forward_backward", losses(model, 2, target=100), "none of the model's, 0 to 99"),
            ("optim_step", step(model, 3, beta1="x"), "adam_params.beta1='x'"),
            ("optim_step", step(model, 4, momentum=0.9), "adam_params.momentum=0.9 is not supported"),
            ("optim_step", {**step(model, 5), "optimizer_params": {"type": "dimuon"}}, "optimizer_params={'type'"),
            ("save_weights", {"model_id": model, "seq_id": 6, "path": "a/b"}, "path='a/b'"),
            ("load_weights", {"model_id": model, "seq_id": 7, "path": saved}, "optimizer='yes'"),
        ]
        (failed[-1][1])["optimizer"] = "yes"
        for path, body, line in failed:
            answer = await server.result(await server.post(path, body))
            assert answer["category"] == "user"
            assert line in answer["error"]
        return await server.result(await server.post("optim_step", step(model, 8)))

    server = Server(tmp_path / "s", "serve.max_body_bytes=2000", "serve.max_samples=8")
    assert run(server, talk)["metrics"] == {"grad_norm": 2.0}
    made = [commands.CreateModel, commands.CreateModel, commands.SaveWeights, commands.OptimStep]
    assert [type(each) for each in server.ranks.commands] == made


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
        server.state.journal.begin(future["request_id"])
    assert "twice: it is refused" in run(server, wait)["error"]
    assert [type(each) for each in server.ranks.commands].count(commands.OptimStep) == 1


def test_a_mistake_of_the_user_is_not_started_again(capsys):
    assert main(["socket", "preset=tiny", "serve.max_lora_rank=0"]) == 2
    assert "serve.max_lora_rank=0" in capsys.readouterr().err


def test_keys_are_made_private_and_read_back(tmp_path):
    (key,) = keys.read(None, tmp_path)
    assert keys.read(None, tmp_path) == (key,)
    assert key.startswith("tml-")
    assert (tmp_path / "api_key").stat().st_mode & 0o777 == 0o600
    assert keys.owner_of(key, (key,)) != keys.owner_of("tml-other", ("tml-other",))
    assert keys.owner_of(f"{key}x", (key,)) is None


def test_the_front_imports_no_torch():
    modules = "isoloss.tools.serve.front.__main__, isoloss.tools.serve.__main__"
    code = f"import sys; import {modules}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_rules_of_sampling_go_to_the_ranks_as_they_are(tmp_path):
    async def talk(server: Server):
        model = await server.client(rank=4)
        sampler = await server.snapshot(model, 1, 0)
        rules = [
            {"stop": ["END", "."], "top_k": 4, "top_p": 0.5, "temperature": 0.0, "max_tokens": 2, "seed": 9},
            {"stop": "END"},
            {"stop": [7, 8]},
            {"stop": []},
            {},
        ]
        for seq, given in enumerate(rules):
            await server.result(await server.post("asample", sample(sampler, seq, sampling_params=given)))
        asked = sample(sampler, 9, prompt_logprobs=True, topk_prompt_logprobs=3, prompt_logprobs_last_n=2)
        response = messages.new("SampleResponse")
        response.ParseFromString(
            await server.result(await server.post("asample", {**asked, "sampling_params": {"max_tokens": 0}}))
        )
        return response

    server = Server(tmp_path / "s")
    response = run(server, talk)
    found = [each.request for each in server.ranks.commands if isinstance(each, commands.Sample)]
    first = found[0]
    assert (first.stop, first.stop_token_ids, first.top_k, first.top_p) == (("END", "."), (), 4, 0.5)
    assert (first.temperature, first.max_tokens, first.seed, first.ids) == (0.0, 2, 9, ("seed/0/0",))
    rest = [(each.stop, each.stop_token_ids, each.max_tokens) for each in found[1:]]
    assert rest == [(("END",), (), 29), ((), (7, 8), 29), ((), (), 29), ((), (2,), 29)]
    assert np.frombuffer(response.prompt_logprobs, np.float32).tolist() == [-1.0, -2.0]
    assert (response.topk_prompt_logprobs.length, response.topk_prompt_logprobs.k) == (2, 3)
    assert not response.sequences


def test_the_likeliest_tokens_are_those_at_the_tokens_that_were_sampled(tmp_path):
    async def talk(server: Server):
        sampler = await server.snapshot(await server.client(rank=4), 1, 0)
        asked = sample(sampler, 0, topk_sample_logprobs=3, num_samples=2)
        response = messages.new("SampleResponse")
        response.ParseFromString(await server.result(await server.post("asample", asked)))
        return response

    server = Server(tmp_path / "s")
    found = [each.topk_sampled_logprobs for each in run(server, talk).sequences]
    # The ranks of the test call a position's number its likeliest token; 3 tokens of prompt are before the sampled one.
    assert [np.frombuffer(each.token_ids, np.int32).tolist() for each in found] == [[3, 3, 3]] * 2
    scored = [(each.prompt, each.top) for each in server.ranks.commands if isinstance(each, commands.Score)]
    assert scored == [((4, 5, 6, 5), 3)] * 2


def test_samples_of_a_version_run_together_and_training_waits_for_them(tmp_path):
    async def talk(server: Server):
        model = await server.client(rank=4)
        sampler = await server.snapshot(model, 1, 0)
        server.ranks.slow.clear()
        samples = [await server.post("asample", sample(sampler, seq)) for seq in range(3)]
        await asyncio.sleep(0.05)
        begun = [type(each).__name__ for each in server.ranks.commands]
        server.ranks.slow.set()
        for each in samples:
            await server.result(each)
        return begun

    assert run(Server(tmp_path / "s"), talk)[2:] == ["Sample"] * 3


def test_weights_in_flight_are_the_newest_of_all_their_samplers(tmp_path):
    async def talk(server: Server):
        model = await server.client(rank=4)
        for seq in (1, 2):
            sampler = await server.snapshot(model, seq, seq, kind="inflight")
            await server.result(await server.post("asample", sample(sampler)))

    server = Server(tmp_path / "s")
    run(server, talk)
    versions = {each.version for each in server.ranks.commands if isinstance(each, commands.Snapshot | commands.Sample)}
    assert len(versions) == 1


def test_checkpoints_are_listed_overwritten_on_demand_and_expire(tmp_path):
    async def talk(server: Server):
        model, other = await server.client(rank=4), await server.client(rank=8, train_unembed=False)
        path = await server.saved(model, 1, "one")
        again = {"model_id": model, "seq_id": 2, "path": "one"}
        assert "exists already" in (await server.result(await server.post("save_weights", again)))["error"]
        assert await server.saved(model, 3, "one", overwrite=True, user_metadata={"step": "3"}) == path
        sampler = await server.saved(other, 1, "two", "save_weights_for_sampler", ttl_seconds=60)
        get = lambda path, key=KEYS[0]: server.post(path, b"", key, "GET")
        _, listed = await get("checkpoints?limit=1")
        assert [each["tinker_path"] for each in listed["checkpoints"]] == [sampler]
        assert listed["checkpoints"][0]["expires_at"] > listed["checkpoints"][0]["time"]
        assert listed["checkpoints"][0]["user_metadata"] is None
        assert listed["cursor"] == {"offset": 0, "limit": 1, "total_count": 2}
        assert (await get("checkpoints", KEYS[1]))[1]["checkpoints"] == []
        _, runs = await get("training_runs")
        assert [(each["training_run_id"], each["lora_rank"]) for each in runs["training_runs"]] == [
            (other, 8),
            (model, 4),
        ]
        last = runs["training_runs"][1]["last_checkpoint"]
        assert (last["size_bytes"], last["user_metadata"]) == (5, {"step": "3"})
        assert (await get(f"training_runs/{model}"))[1]["last_sampler_checkpoint"] is None
        assert (await get(f"training_runs/{model}", KEYS[1]))[0] == 404
        assert (await get(f"training_runs/{other}/checkpoints"))[1]["checkpoints"][0]["checkpoint_id"] == (
            "sampler_weights/two"
        )
        info = (await server.post("weights_info", {"tinker_path": sampler}))[1]
        assert (info["lora_rank"], info["train_unembed"], info["train_mlp"]) == (8, False, True)
        (session,) = (await get("sessions?offset=1&limit=1"))[1]["sessions"]
        assert (await get(f"sessions/{session}"))[1]["training_run_ids"] == [model]
        assert (await get("checkpoints?limit=many"))[0] == 400

        here = f"training_runs/{model}/checkpoints/weights/one"
        assert (await server.post(f"{here}/publish", b""))[0] == 400
        assert (await server.post(f"{here}/ttl", {"ttl_seconds": 5}, KEYS[1], "PUT"))[0] == 404
        assert (await server.post(f"{here}/ttl", {"ttl_seconds": 5}, KEYS[0], "PUT"))[0] == 204
        assert (await server.post(f"{here}x", b"", KEYS[0], "DELETE"))[0] == 404
        await housekeeping.look(server.state, server.dispatcher, time.time() + 10)
        assert [each["tinker_path"] for each in (await get("checkpoints"))[1]["checkpoints"]] == [sampler]
        there = f"training_runs/{other}/checkpoints/sampler_weights/two"
        assert (await server.post(there, b"", KEYS[0], "DELETE"))[0] == 204
        assert (await get("checkpoints"))[1]["checkpoints"] == []
        assert not [*(tmp_path / "s" / "checkpoints").iterdir()]
        return "gone"

    assert run(Server(tmp_path / "s"), talk) == "gone"


def test_clients_that_are_gone_leave_nothing_in_memory(tmp_path):
    async def talk(server: Server):
        silent, finished, living = [await server.client(rank=4) for _ in range(3)]
        sampler = await server.snapshot(silent, 1, 0)
        server.ranks.slow.clear()
        running = await server.post("asample", sample(sampler))
        await asyncio.sleep(0.05)
        held = await server.post("optim_step", step(silent, 3))
        await server.post(f"sessions/{finished.split(':')[0]}/finish", {"reason": {"type": "success"}})
        start = time.time()
        await server.post("session_heartbeat", {"session_id": living.split(":")[0]})
        await housekeeping.look(server.state, server.dispatcher, start + 130)
        assert "has ended" in (await server.result(running))["error"]
        assert (await server.post("optim_step", step(finished, 1)))[0] == 404
        polled = await server.post("asample", sample(sampler, 1))
        server.state.heard[silent.split(":")[0]] = start + 150  # as if the client asked for the result
        await housekeeping.look(server.state, server.dispatcher, start + 200)
        assert server.state.journal.answer(polled[1]["request_id"]) is None
        assert (await server.post("retrieve_future", {"request_id": held[1]["request_id"]}, method="HEAD"))[0] == 405
        await housekeeping.look(server.state, server.dispatcher, start + 3800)
        await server.post("session_heartbeat", {"session_id": living.split(":")[0]})
        assert len(server.state.journal.rows("models", dropped=0)) == 0
        assert server.state.journal.rows("versions") == []
        return [each for each in server.ranks.commands if isinstance(each, commands.DropModel | commands.DropVersion)]

    dropped = run(Server(tmp_path / "s"), talk)
    assert [type(each).__name__ for each in dropped] == ["DropModel", "DropModel", "DropVersion", "DropModel"]


def test_versions_beyond_the_most_are_written_and_read_again(tmp_path):
    async def talk(server: Server):
        model = await server.client(rank=4)
        samplers = [await server.snapshot(model, seq + 1, seq) for seq in range(3)]
        for sampler in samplers:
            await server.result(await server.post("asample", sample(sampler)))

    server = Server(tmp_path / "s", "serve.max_versions=2")
    run(server, talk)
    kinds = [type(each).__name__ for each in server.ranks.commands[1:]]
    assert kinds[:5] == ["Snapshot", "Snapshot", "Snapshot", "SaveVersion", "DropVersion"]
    assert kinds.count("LoadVersion") == 3  # each in its turn was the oldest
    assert kinds.count("Sample") == 3


def test_results_of_another_key_do_not_exist(tmp_path):
    async def talk(server: Server):
        model = await server.client(rank=4)
        _, future = await server.post("optim_step", step(model, 1))
        asked = {"request_id": future["request_id"]}
        return [(await server.post("retrieve_future", asked, key))[0] for key in KEYS]

    assert run(Server(tmp_path / "s"), talk) == [200, 410]


def test_a_session_that_is_asked_for_again_is_the_same(tmp_path):
    async def talk(server: Server):
        ask = lambda **headers: server.post("create_session", {}, **headers)
        first, again, other = await ask(x_idempotency_key="a"), await ask(x_idempotency_key="a"), await ask()
        return first[1]["session_id"], again[1]["session_id"], other[1]["session_id"]

    first, again, other = run(Server(tmp_path / "s"), talk)
    assert first == again != other


def test_requests_that_wait_take_little_memory(tmp_path):
    async def talk(server: Server):
        model = await server.client(rank=4)
        body = losses(model, 0, tokens=2000)
        tracemalloc.start()
        for seq in range(2, 2002):  # 1 is on its way
            server.state.submit("o", model, seq, "forward_backward", body)
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return size / 2000

    assert run(Server(tmp_path / "s"), talk) < 2500  # bytes a request, whose body has 24,000


def test_an_adapter_is_downloaded_from_signed_addresses_for_its_recipient_alone(tmp_path):
    identity = pyrage.x25519.Identity.generate()

    async def talk(server: Server):
        model = await server.client(rank=4)
        get = lambda path, key=KEYS[0]: server.post(path, b"", key, "GET")
        files = {}
        for seq, recipients in ((1, None), (2, [str(identity.to_public())])):
            name = f"out{seq}"
            await server.saved(model, seq, name, "save_weights_external", age_encryption_recipients=recipients)
            where = f"training_runs/{model}/checkpoints/external_weights/{name}/external_weights_urls"
            assert (await get(where, KEYS[1]))[0] == 404
            _, found = await get(where)
            for file, url in found["urls"].items():
                assert url.startswith("http://server/")
                status, files[file] = await server.post(url.removeprefix("http://server"), b"", "", "GET")
                assert status == 200
                parts = url.removeprefix("http://server").split("/")
                for wrong in ([*parts[:3], str(int(parts[3]) + 1)], [*parts[:4], "0" * 64]):
                    forged = "/".join([*wrong, *parts[len(wrong) :]])
                    assert (await server.post(forged, b"", "", "GET"))[0] == 403
        bad = {"model_id": model, "seq_id": 3, "path": "x", "age_encryption_recipients": ["age1wrong"]}
        refused = await server.result(await server.post("save_weights_external", bad))
        load = {"model_id": model, "seq_id": 4, "path": f"tinker://{model}/external_weights/out1", "optimizer": False}
        return files, refused["error"], (await server.result(await server.post("load_weights", load)))["error"]

    files, refused, loaded = run(Server(tmp_path / "s"), talk)
    assert files.keys() == {"weights", "weights.age"}
    assert files["weights"] == b"12345" == pyrage.decrypt(files["weights.age"], [identity])
    assert refused.startswith("age_encryption_recipients: ")
    assert "is an export" in loaded
