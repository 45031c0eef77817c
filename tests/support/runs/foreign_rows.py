"""Rows as the documentation of other projects has them, and the messages that stand in them, written by hand.

Sources: TRL docs/source/dataset_formats.md; ms-swift docs/source_en/Customization/Custom-dataset.md and
Instruction/Agent-support.md; LLaMA-Factory data/README.md; OpenAI's reference of fine-tuning
(FineTuneChatRequestInput); verl examples/data_preprocess/gsm8k.py; slime docs/en/get_started/quick_start.md; GSM8K's
and MATH's own columns.
"""

import csv
import gzip
import json
from pathlib import Path

import pyarrow as pa
from pyarrow import feather, parquet


def system(text: str) -> dict:
    return {"role": "system", "content": text}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str, **more: object) -> dict:
    return {"role": "assistant", "content": text, **more}


def call(name: str, **arguments: object) -> dict:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


WEATHER = {
    "name": "get_current_weather",
    "description": "Get the current weather",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
}
TOOLS = [{"type": "function", "function": WEATHER}]
SKY = [user("What color is the sky?"), assistant("It is blue.")]
GPT_FUNCTIONS = [
    {"from": "human", "value": "Weather in Paris?"},
    {"from": "function_call", "value": '{"name": "get_current_weather", "arguments": {"location": "Paris"}}'},
    {"from": "observation", "value": "15 degrees"},
    {"from": "gpt", "value": "It is mild."},
]
CALLED = [
    user("Weather in Paris?"),
    call("get_current_weather", location="Paris"),
    {"role": "tool", "content": "15 degrees"},
    assistant("It is mild."),
]
# As `Agent-support.md` of ms-swift has them.
CALL_SWIFT = {"role": "tool_call", "content": '{"name": "realtime_aqi", "arguments": {"city": "Beijing"}}'}
RESULT_SWIFT = {"role": "tool_response", "content": '{"city": "Beijing", "aqi": "10", "unit": "celsius"}'}
AQI = {"type": "function", "function": {"name": "realtime_aqi", "arguments": {"city": "Beijing"}}}
# name -> (the row, the columns of a row of isoloss that says the same, the name of its form in the banner)
SFT: dict[str, tuple[dict, dict, str]] = {
    "TRL language modeling": ({"text": "The sky is blue."}, {"text": "The sky is blue."}, "text"),
    "TRL language modeling, conversational": ({"messages": SKY}, {"messages": SKY}, "messages"),
    "TRL prompt-completion": (
        {"prompt": "The sky is", "completion": " blue."},
        {"prompt": "The sky is", "completion": " blue."},
        "prompt + completion",
    ),
    "TRL prompt-completion, conversational": (
        {"prompt": SKY[:1], "completion": SKY[1:]},
        {"prompt": SKY[:1], "completion": SKY[1:]},
        "prompt + completion",
    ),
    "ms-swift messages": (
        {"messages": [system("<system>"), user("<query1>"), assistant("<response1>"), user("q2"), assistant("r2")]},
        {"messages": [system("<system>"), user("<query1>"), assistant("<response1>"), user("q2"), assistant("r2")]},
        "messages",
    ),
    "ms-swift ShareGPT": (
        {"system": "<system>",
         "conversation": [{"human": "q1", "assistant": "r1"}, {"human": "q2", "assistant": "r2"}]},
        {"messages": [system("<system>"), user("q1"), assistant("r1"), user("q2"), assistant("r2")]},
        "human/assistant",
    ),
    "ms-swift Alpaca": (
        {"system": "<system>", "instruction": "<query-inst>", "input": "<query-input>", "output": "<response>"},
        {"messages": [system("<system>"), user("<query-inst>\n<query-input>"), assistant("<response>")]},
        "Alpaca",
    ),
    "ms-swift query-response": (
        {"system": "<system>", "query": "<query2>", "response": "<response2>",
         "history": [["<query1>", "<response1>"]]},
        {"messages": [system("<system>"), user("<query1>"), assistant("<response1>"), user("<query2>"),
                      assistant("<response2>")]},
        "query/response",
    ),
    "ms-swift ToolBench": (
        {"tools": TOOLS, "conversations": [user("Order a ticket"), assistant("Action: xxx"),
                                           {"role": "tool", "content": "{'response': 'ok'}"}, assistant("Finished.")]},
        {"tools": TOOLS, "messages": [user("Order a ticket"), assistant("Action: xxx"),
                                      {"role": "tool", "content": "{'response': 'ok'}"}, assistant("Finished.")]},
        "ShareGPT",
    ),
    "LLaMA-Factory Alpaca": (
        {"instruction": "human instruction", "input": "", "output": "model response",
         "history": [["first instruction", "first response"], ["second instruction", "second response"]]},
        {"messages": [user("first instruction"), assistant("first response"), user("second instruction"),
                      assistant("second response"), user("human instruction"), assistant("model response")]},
        "Alpaca",
    ),
    "LLaMA-Factory ShareGPT": (
        {"conversations": GPT_FUNCTIONS, "system": "system prompt", "tools": json.dumps([WEATHER])},
        {"messages": [system("system prompt"), *CALLED], "tools": [WEATHER]},
        "ShareGPT",
    ),
    "LLaMA-Factory ShareGPT with calls at once": (
        {"conversations": [{"from": "human", "value": "Beijing, twice?"},
                           {"from": "function_call", "value": CALL_SWIFT["content"]},
                           {"from": "function_call", "value": f"[{CALL_SWIFT['content']}]"},
                           {"from": "observation", "value": "10"}, {"from": "observation", "value": "11"},
                           {"from": "function_call", "value": CALL_SWIFT["content"]},
                           {"from": "observation", "value": "12"}, {"from": "gpt", "value": "It is 12."}]},
        {"messages": [user("Beijing, twice?"), {"role": "assistant", "tool_calls": [AQI, AQI]},
                      {"role": "tool", "content": "10"}, {"role": "tool", "content": "11"},
                      {"role": "assistant", "tool_calls": [AQI]}, {"role": "tool", "content": "12"},
                      assistant("It is 12.")]},
        "ShareGPT",
    ),
    "LLaMA-Factory OpenAI": (
        {"messages": [system("system prompt"), user("instruction"), assistant("response")]},
        {"messages": [system("system prompt"), user("instruction"), assistant("response")]},
        "messages",
    ),
    "OpenAI weight": (
        {"messages": [user("2+2?"), assistant("5", weight=0), user("Sure?"), assistant("4", weight=1)]},
        {"messages": [user("2+2?"), assistant("5", train=False), user("Sure?"), assistant("4")]},
        "messages",
    ),
    "OpenAI tools": (
        {"messages": [user("Weather in Paris?"),
                      {"role": "assistant", "tool_calls": [{"id": "call_id", "type": "function", "function": {
                          "name": "get_current_weather", "arguments": '{"location": "Paris"}'}}]}],
         "parallel_tool_calls": False, "tools": TOOLS},
        {"messages": CALLED[:2], "tools": TOOLS},
        "messages",
    ),
    "OpenAI functions": (
        {"messages": [user("Weather in Paris?"),
                      {"role": "assistant", "function_call": {
                          "name": "get_current_weather", "arguments": '{"location": "Paris"}'}},
                      {"role": "function", "name": "get_current_weather", "content": "15 degrees"},
                      assistant("It is mild.")],
         "functions": [WEATHER]},
        {"messages": CALLED, "tools": TOOLS},
        "messages",
    ),
    "ms-swift agent": (
        {"tools": json.dumps(TOOLS), "messages": [user("Beijing?"), CALL_SWIFT, CALL_SWIFT, RESULT_SWIFT, RESULT_SWIFT,
                                                  assistant("It is 10.")]},
        {"tools": TOOLS, "messages": [
            user("Beijing?"), {"role": "assistant", "tool_calls": [AQI, AQI]},
            {"role": "tool", "content": RESULT_SWIFT["content"]}, {"role": "tool", "content": RESULT_SWIFT["content"]},
            assistant("It is 10.")]},
        "messages with tool_call",
    ),
    "ms-swift agent, after a thought and not learned": (
        {"messages": [user("Beijing?"), assistant("<think>\nhm\n</think>\n", loss=False), CALL_SWIFT | {"loss": False},
                      RESULT_SWIFT, CALL_SWIFT, {"role": "tool", "content": "15 degrees"}, assistant("It is mild.")]},
        {"messages": [user("Beijing?"), assistant("<think>\nhm\n</think>\n", loss=False, tool_calls=[AQI]),
                      {"role": "tool", "content": RESULT_SWIFT["content"]}, {"role": "assistant", "tool_calls": [AQI]},
                      {"role": "tool", "content": "15 degrees"}, assistant("It is mild.")]},
        "messages with tool_call",
    ),
    "GSM8K": (
        {"question": "Janet has 2 eggs and sells 1.", "answer": "2 - 1 = <<2-1=1>>1\n#### 1"},
        {"messages": [user("Janet has 2 eggs and sells 1."), assistant("2 - 1 = <<2-1=1>>1\n#### 1")]},
        "question/answer",
    ),
    "MATH": (
        {"problem": "What is $1+1$?", "level": "Level 1", "type": "Algebra", "solution": "It is $\\boxed{2}$."},
        {"messages": [user("What is $1+1$?"), assistant("It is $\\boxed{2}$.")]},
        "problem/solution",
    ),
}  # fmt: skip
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [user("Janet has 2 eggs. Let's think step by step and output the final answer after `####`.")],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0, "answer": "#### 2", "question": "Janet has 2 eggs."},
}
SLIME = {"prompt": [user("What is $30 + 4$?")], "label": "34", "metadata": {"rm_type": "math"}}
# name -> (the row, its prompt, its answer, its form, columns that reward functions can read by their names)
RL: dict[str, tuple[dict, str | list[dict], object, str, dict]] = {
    "TRL prompt-only": ({"prompt": "The sky is"}, "The sky is", None, "prompt as text", {}),
    "TRL prompt-only, conversational": ({"prompt": SKY[:1]}, SKY[:1], None, "prompt", {}),
    "TRL with a solution": (
        {"prompt": SKY[:1], "solution": "blue"}, SKY[:1], "blue", "prompt", {"solution": "blue"},
    ),
    "ms-swift GRPO": (
        {"messages": [system("a calculator"), user("1 + 1?")], "solution": "2"},
        [system("a calculator"), user("1 + 1?")], "2", "messages", {"solution": "2"},
    ),
    "verl": (
        VERL, VERL["prompt"], "2", "prompt",
        {"ability": "math", "reward_model": VERL["reward_model"], "extra_info": VERL["extra_info"]},
    ),
    "slime": (SLIME, SLIME["prompt"], "34", "prompt", {"label": "34", "metadata": {"rm_type": "math"}}),
    "GSM8K": (
        {"question": "How many?", "answer": "#### 1"}, [user("How many?")], "#### 1", "question/answer",
        {"question": "How many?"},
    ),
    "MATH": (
        {"problem": "What is $1+1$?", "solution": "$\\boxed{2}$"}, [user("What is $1+1$?")], "$\\boxed{2}$",
        "problem/solution", {"problem": "What is $1+1$?", "solution": "$\\boxed{2}$"},
    ),
    "DeepScaleR": (
        {"problem": "What is $1+1$?", "solution": "It is 2.", "answer": "2"}, [user("What is $1+1$?")], "2",
        "problem/solution", {"problem": "What is $1+1$?", "solution": "It is 2."},
    ),
    "Alpaca": (
        {"instruction": "Add", "input": "1, 1", "output": "2"}, [user("Add\n1, 1")], None, "Alpaca",
        {"instruction": "Add", "input": "1, 1", "output": "2"},
    ),
    "ShareGPT": (
        {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}], "answer": "a"},
        [system("s"), user("q")], "a", "ShareGPT",
        {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}]},
    ),
}  # fmt: skip
# name -> (the row, what the refusal says); all of them of TRL and of ms-swift, but the last of LLaMA-Factory
REFUSED = {
    "preference": ({"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}, "no training on preferences"),
    "preference, implicit prompt": ({"chosen": "The sky is blue.", "rejected": "green."}, "no training on preferences"),
    "preference, conversational": (
        {"prompt": SKY[:1], "chosen": SKY[1:], "rejected": [assistant("It is green.")]}, "no training on preferences",
    ),
    "unpaired preference": ({"prompt": "The sky is", "completion": " blue.", "label": True}, "(unpaired preference)"),
    "unpaired preference, conversational": (
        {"prompt": SKY[:1], "completion": [assistant("It is green.")], "label": False}, "(unpaired preference)",
    ),
    "stepwise": (
        {"prompt": "9.8 or 9.11?", "completions": ["0.8.", "0.11."], "labels": [True, False]}, "(stepwise supervision)",
    ),
    "ms-swift DPO": ({"messages": SKY, "rejected_response": "I don't know"}, "no training on preferences"),
    "ms-swift KTO": ({"messages": SKY, "label": False}, "(unpaired preference)"),
    "ms-swift multimodal": ({"messages": SKY, "images": ["/xxx/x.jpg"]}, "trains on text alone"),
    "LLaMA-Factory KTO": (
        {"instruction": "i", "input": "", "output": "o", "kto_tag": True}, "no training on preferences",
    ),
}  # fmt: skip
TALKS = [{"messages": [user(f"{n}?"), assistant(f"{n}!")]} for n in range(8)]


def write_file(folder: Path, name: str, rows: list[dict]) -> str:
    """Write a file of rows as its name says, with the libraries that others write it with."""
    path, table = folder / name, pa.Table.from_pylist(rows)
    stem, _, packed = name.partition(".")[2].partition(".")
    match stem:
        case "jsonl" | "ndjson":
            data = "".join(json.dumps(row) + "\n" for row in rows)
        case "json":
            data = json.dumps(rows, indent=1, ensure_ascii=False)
        case "csv" | "tsv":
            with open(path, "w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]), delimiter="," if stem == "csv" else "\t")
                writer.writeheader()
                writer.writerows(rows)
            data = path.read_bytes().decode()
        case "parquet":
            return parquet.write_table(table, path) or str(path)
        case "feather":
            return feather.write_feather(table, path) or str(path)
        case _:
            opened = pa.ipc.new_stream if name.startswith("stream") else pa.ipc.new_file
            with opened(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=30)
            return str(path)
    raw = data.encode()
    half = len(raw) // 2
    if packed == "gz":
        raw = gzip.compress(raw[:half]) + gzip.compress(raw[half:])
    if packed == "zst":
        codec = pa.Codec("zstd")
        raw = b"".join(codec.compress(part, asbytes=True) for part in (raw[:half], raw[half:]))
    path.write_bytes(raw)
    return str(path)


def save(folder: Path, rows: list[dict], shards: int = 1) -> None:
    """What `Dataset.save_to_disk` of datasets 5.2 writes: Arrow streams, and state.json with their names."""
    folder.mkdir(parents=True)
    names = [f"data-{n:05}-of-{shards:05}.arrow" for n in range(shards)]
    for number, name in enumerate(names):
        table = pa.Table.from_pylist(rows[number::shards])
        with pa.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "f90bacad4aefefbe", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text('{"features": {}}')
