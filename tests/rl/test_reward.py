"""Rewards: what functions are given, what becomes of what they return, and of their processes."""

import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from importlib.resources import files
from pathlib import Path

import psutil
import pytest
from rl import reward_faults
from support.runs.terminal import terminal
from support.runs.waiting import LONG, until

from isoloss.engine.data.chat import load_tokenizer
from isoloss.engine.rl.config import RewardConfig
from isoloss.engine.rl.reward.pool import Call, RewardPool
from isoloss.engine.rl.reward.rewarder import BUILT_IN, Rewarder, Scored, check_rewarded
from isoloss.engine.rl.trajectory import Completion, Prompt, Trajectory
from isoloss.parallel.runtime.console import LivePart
from isoloss.parallel.runtime.errors import UserError

TINY = str(files("isoloss.recipes") / "assets" / "tiny")
END = 2
ASK = ({"role": "user", "content": "2+2?"},)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY, 2048)


@pytest.fixture
def completion(tokenizer):
    def completion(text: str, number: int = 0, finish="stop") -> Completion:
        tokens = (*tokenizer.encode(text), *([END] if finish == "stop" else []))
        return Completion(f"t:1/0/{number}", tokens, (0.0,) * len(tokens), (0,) * len(tokens), finish)

    return completion


@pytest.fixture
def write(tmp_path):
    def write(source: str, name: str = "mine.py") -> str:
        (tmp_path / name).write_text(textwrap.dedent(source))
        return str(tmp_path / name)

    return write


@pytest.fixture
def score(tokenizer, completion):
    """score(functions, texts, prompt or prompts, **RewardConfig) -> what became of each text."""

    def score(function, texts, prompts=None, finish="stop", **config) -> list[Scored]:
        prompts = prompts or prompt()
        prompts = [prompts] * len(texts) if isinstance(prompts, Prompt) else prompts
        function = (function,) if isinstance(function, str) else tuple(function)
        settings = RewardConfig(function=function, **({"workers": 1} | config))
        with Rewarder(settings, tokenizer, prompts) as rewarder:
            completions = [completion(text, number, finish) for number, text in enumerate(texts)]
            return rewarder.score(prompts, completions)

    return score


def prompt(answer="4", text="2+2=", **extra) -> Prompt:
    return Prompt(id="t:1", tokens=(1,), prompt=text, answer=answer, source="sums", extra=extra)


def gone(pids) -> bool:
    """Whether the processes end by themselves; the last signal may be on its way."""
    end = time.monotonic() + LONG
    while (left := [pid for pid in pids if runs(pid)]) and time.monotonic() < end:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return not left


def runs(pid: int) -> bool:
    """A process that has ended stays a zombie until whoever inherited it looks after it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ------------------------------------------------------------------------------------------------------------ built in


def test_exact_match(score):
    rewards = score("exact_match", ["4", " 4\n", "5", "4 4", ""])
    assert [each.reward for each in rewards] == [1, 1, 0, 0, 0]
    assert rewards[1].text == " 4\n" and rewards[0].parts == {"exact_match": 1.0} and rewards[0].error is None
    assert score("exact_match", ["4"], prompt(answer=4))[0].reward == 1
    assert score("exact_match", ["4"], finish="length")[0].reward == 0  # it had not said that this was all


def test_math(score):
    cases = [
        ("1/2", r"so \boxed{\frac{1}{2}}", 1),
        (r"\frac{1}{2}", "it is 0.5", 1),
        (42, "thus $6 \\cdot 7 = 42$.", 1),
        ("first 3, then 39\n#### 42", "42", 1),
        (r"Adding, we find $\boxed{1+x^2}$", r"\boxed{x^2+1}", 1),
        ("1,234", r"\boxed{1234}", 1),
        ("5", r"5, no: \boxed{6}", 0),
        ("5", "I do not know", 0),
    ]
    scored = score("math", [text for _, text, _ in cases], [prompt(answer=answer) for answer, _, _ in cases])
    assert [each.reward for each in scored] == [reward for _, _, reward in cases]


def test_format(score):
    texts = {
        "<think>two and two</think>4": 1,
        " <think>two\nand two</think>\n\nfour\nit is\n": 1,
        "<think>two and two</think> \n": 0,
        "4": 0,
        "<think>two and two": 0,
        "so <think>two and two</think>4": 0,
        "<think>two</think><think>and two</think>4": 0,
        "<think><think>two</think>4": 0,
    }
    assert [each.reward for each in score("format", list(texts))] == list(texts.values())


def test_weighted_sum(score, write):
    path = write("def length(completion): return len(completion)")
    (scored,) = score(["exact_match", f"{path}:length"], ["4"], weights=(1.0, 0.25))
    assert scored.reward == 1.25 and scored.parts == {"exact_match": 1.0, "length": 1.0}
    other = write("def length(completion): return 3", "other.py")
    (scored,) = score([f"{path}:length", f"{other}:length"], ["4"])
    assert scored.parts == {f"{path}:length": 1.0, f"{other}:length": 3.0} and scored.reward == 4


def test_missing_answers_are_no_zeros(score):
    some, none = score("exact_match", ["4", "4"], [prompt(), prompt(answer=None)])
    assert some.reward == 1 and math.isnan(none.reward) and "no answer" in none.error
    with pytest.raises(UserError, match=r"reward.function=exact_match: nothing provides its parameter 'answer'"):
        score("exact_match", ["4"], prompt(answer=None))
    bad, good = score("math", ["4", "4"], [prompt(answer=" "), prompt()])
    assert good.reward == 1 and math.isnan(bad.reward) and "finds no expression" in bad.error


def test_texts(tokenizer):
    """Special tokens are left out, and the stop token even where it is an ordinary one."""
    tokens = (1, *tokenizer.encode("user\nHi"), END, *tokenizer.encode(" there!"))
    ends = [("stop", " there"), ("length", " there!"), ("abort", " there!")]
    completions = [Completion(str(i), tokens, (0.0,) * len(tokens), (0,) * len(tokens), end) for i, (end, _) in
                   enumerate(ends)]  # fmt: skip
    with Rewarder(RewardConfig(function=("exact_match",)), tokenizer, [prompt()]) as rewarder:
        scored = rewarder.score([prompt()] * 3, completions)
        assert [each.text for each in scored] == [f"user\nHi{text}" for _, text in ends]
        assert rewarder.score([], []) == []


# --------------------------------------------------------------------------------------------------------- conventions


def test_own_convention(score, write):
    path = write("""
        import json
        def check(**given):
            assert given == {"level": 3, "tags": ["a"]}, given
            return 1
        def some(prompt, completion, answer, source, finish, id, completion_tokens, level, absent="d", *rest, **extra):
            assert (prompt, completion, answer, source, finish) == ("2+2=", "four", "4", "sums", "stop")
            assert id == "t:1/0/0" and completion_tokens[-1] == 2 and level == 3 and absent == "d"
            assert extra == {"tags": ["a"]} and rest == ()
            return True
        def messages(prompt): return json.dumps(prompt) == '[{"role": "user", "content": "2+2?"}]'
        class Length:
            def __call__(self, completion): return len(completion)
        instance = Length()
        async def later(completion):
            import asyncio
            await asyncio.sleep(0)
            return 0.5
        """)
    row = prompt(level=3, tags=["a"], completion="of the row")
    assert score(f"{path}:some", ["four"], row)[0] == Scored(1.0, {"some": 1.0}, None, "four")
    assert score([f"{path}:check", f"{path}:instance", f"{path}:later"], ["four"], row)[0].reward == 5.5
    assert score(f"{path}:messages", ["four"], prompt(text=ASK))[0].reward == 1


def test_a_column_that_a_row_lacks(score, write):
    path = write("""
        def required(completion, level): return -1 if level is None else level
        def optional(completion, level=7): return level
        """)
    scored = score([f"{path}:required", f"{path}:optional"], ["a", "b"], [prompt(level=3), prompt()])
    assert [each.parts for each in scored] == [{"required": 3, "optional": 3}, {"required": -1, "optional": 7}]


def test_a_column_under_a_name_of_verl(score, write):
    path = write("def f(completion, ground_truth, data_source=None): return completion == ground_truth == '4'")
    assert score(f"{path}:f", ["4"], prompt(ground_truth="4"))[0].reward == 1


def test_verl_convention(score, write):
    path = write("""
        def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
            assert not kwargs and data_source == "sums"
            return {"score": extra_info["points"] * (solution_str == ground_truth), "acc": True}
        def plain(solution_str, ground_truth, **kwargs): return solution_str == ground_truth
        """)
    row = prompt(extra_info={"points": 3}, split="train")
    assert [each.reward for each in score(f"{path}:compute_score", ["4", "5"], row)] == [3, 0]
    assert [each.reward for each in score(f"{path}:plain", ["4", "5"])] == [1, 0]


def test_trl_convention(score, write):
    path = write("""
        calls = 0
        def accuracy(prompts, completions, solution, **kwargs):
            global calls
            calls += 1
            assert calls == 1 and kwargs["data_source"] == ["sums"] * len(prompts) and "trainer_state" not in kwargs
            contents = [completion[0]["content"] for completion in completions]
            assert prompts == [[{"role": "user", "content": "2+2?"}]] * len(prompts)
            return [None if s is None else float(c == s) for c, s in zip(contents, solution)]
        def text(completions, completion_ids, trainer_state):
            import array
            assert [ids[-1] for ids in completion_ids] == [2] * len(completions) and trainer_state is None
            return array.array("d", [len(completion) for completion in completions])
        async def later(completions, answer, **kwargs): return [float(c == a) for c, a in zip(completions, answer)]
        """)
    rows = [prompt(text=ASK, solution="4"), prompt(text=ASK, solution="5"), prompt(text=ASK)]
    scored = score([f"{path}:accuracy", "exact_match"], ["4"] * 3, rows, weights=(10.0, 1.0))
    assert [each.reward for each in scored] == [11, 1, 1]
    assert [each.parts for each in scored] == [
        {"accuracy": 1, "exact_match": 1},
        {"accuracy": 0, "exact_match": 1},
        {"exact_match": 1},
    ]
    inapplicable = score(f"{path}:accuracy", ["4"] * 3, rows)[2]
    assert math.isnan(inapplicable.reward) and "no reward function applies" in inapplicable.error
    assert [each.reward for each in score([f"{path}:text", f"{path}:later"], ["4", "five"])] == [2, 4]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "exactmatch",
            r"=exactmatch is neither built in \(exact_match, math, format\).*did you mean exact_match\?",
        ),
        (":f", r"reward.function=:f is neither"),
        ("FILE:chek", r"reward.function=FILE:chek names no function of FILE: did you mean check\?"),
        ("FILE:number", r"names no function of FILE"),
        ("gone.py:f", r"reward.function=gone.py:f names a file that is not there, seen from "),
        ("isoloss_absent.x:f", r"names a module that is not there \(isoloss_absent\)"),
        ("json.tools:f", r"names a module that is not there \(json.tools\)"),
        ("BROKEN:f", r"cannot be imported: ZeroDivisionError: division by zero \(BROKEN:2\)"),
        ("LACKS:f", r"cannot be imported: ModuleNotFoundError: No module named 'isoloss_absent' \(LACKS:1\)"),
        ("DIES:f", r"reward.function=\[DIES:f\] ended its process with status 3 while it was imported"),
        ("FILE:unknown", r"nothing provides its parameter 'lvl': there are answer, .*level.*add that column"),
        (
            "FILE:verl",
            r"mine.py:verl: nothing provides its parameter 'tries': there are completion_f.*data_source",
        ),
        (
            "FILE:trl",
            r"=FILE:trl: nothing provides its parameter 'log': there are answer, completion_ids",
        ),
        ("FILE:nameless", r"its parameter 'completion' has no name to callers: take the /"),
        ("builtins:iter", r"reward.function=builtins:iter does not tell its parameters"),
    ],
)
def test_functions_that_cannot_be_used(score, write, name, says):
    paths = {
        "FILE": write("""
            number = 3
            def check(completion): return 1
            def unknown(completion, lvl): return 1
            def verl(solution_str, tries): return 1
            def trl(completions, log): return 1
            def nameless(completion, /): return 1
            """),
        "BROKEN": write("\n1 / 0\n", "broken.py"),
        "LACKS": write("import isoloss_absent", "lacks.py"),
        "DIES": write("import os; os._exit(3)", "dies.py"),
    }
    for key, path in paths.items():
        name, says = name.replace(key, path), says.replace(key, path)
    with pytest.raises(UserError, match=says) as error:
        score(name, ["4"], prompt(level=3))
    assert "\n" not in str(error.value)


def test_modules_are_found_from_the_working_folder(score, write, tmp_path, monkeypatch):
    write("def f(completion): return 2", "isoloss_test_rewards.py")
    monkeypatch.chdir(tmp_path)
    assert score(["isoloss_test_rewards:f", "isoloss_test_rewards.py:f"], ["4"])[0].reward == 4


def test_a_file_is_run_once_and_hides_no_library(score, write):
    path = write("""
        import dataclasses
        count = 0
        @dataclasses.dataclass
        class Point:
            x: "int"
        def first(completion):
            global count
            count += 1
            import json
            return json.loads("1")
        def second(completion): return Point(count).x
        """, "json.py")  # fmt: skip
    (scored,) = score([f"{path}:first", f"{path}:second"], ["4"])
    assert scored.parts == {"first": 1, "second": 1}


# ------------------------------------------------------------------------------------------------------------ failures

FAULTS = """
    import ctypes, math, os, re, sys, time
    def one(completion):
        if completion == "raise": raise ValueError("odd\\nthing")
        if completion == "nan": return math.nan
        if completion == "inf": return math.inf
        if completion == "none": return None
        if completion == "text": return "1.0"
        if completion == "list": return [1.0, 2.0]
        if completion == "lambda": return lambda: 1
        if completion == "exit": sys.exit(7)
        if completion == "_exit": os._exit(0)
        if completion == "segfault": ctypes.string_at(0)
        if completion == "sleep": time.sleep(1000)
        if completion == "regex": re.match(r"(a+)+$", "a" * 60 + "b")  # holds the interpreter's lock
        return len(completion)
    """
SAID = {
    "raise": r"one: ValueError: odd thing \(.*mine.py:4\)",
    "nan": "one: returned float nan, not a finite number",
    "inf": "one: returned float inf",
    "none": "one: returned NoneType None",
    "text": r"one: returned str '1.0'",
    "list": r"one: returned list \[1.0, 2.0\]",
    "lambda": "one: returned function <function",
    "exit": "one: ended its process with status 7",
    "_exit": "one: ended its process with status 0",
    "segfault": "one: ended its process by signal 11",
}
HANGS = dict.fromkeys(("sleep", "regex"), "one: took longer than reward.timeout=3 seconds")


@pytest.mark.parametrize(("said", "timeout"), [(SAID, LONG), (HANGS, 3.0)], ids=("ends", "hangs"))
def test_a_failure_costs_its_own_completion_only(score, write, said, timeout):
    path = write(FAULTS)
    texts = [text for fault in said for text in (fault, "good")]
    scored = score([f"{path}:one", "exact_match"], texts, timeout=timeout, workers=2)
    for text, each in zip(texts, scored):
        if text == "good":
            assert each == Scored(4.0, {"one": 4.0, "exact_match": 0.0}, None, "good")
        else:
            assert math.isnan(each.reward) and math.isnan(each.parts["one"]) and each.parts["exact_match"] == 0
            assert re.match(said[text], each.error), each.error


def test_nothing_but_failures(score, write, completion):
    """One good completion is enough to go on; without any there is nothing to learn from."""
    path = write(FAULTS)
    of_one = score(f"{path}:one", ["raise", "nan", "good"])
    batch = [Trajectory.of_one_turn(prompt(), completion(s.text), s.text, s.reward, s.parts, s.error) for s in of_one]
    check_rewarded(batch, "reward.function=[exact_match]")
    with pytest.raises(UserError, match=r"none of 2 completions could be rewarded; the first, t:1/0/0: one: ValueErr"):
        check_rewarded(batch[:2], "reward.function=[exact_match]")


def test_one_function_of_the_whole_batch_is_enough_to_wait_for_it(write, tokenizer):
    path = write("def trl(prompts, completions): return [0.0] * len(prompts)")
    for functions, whole_batch in ((["exact_match"], False), ([f"{path}:trl"], True), (["math", f"{path}:trl"], True)):
        with Rewarder(RewardConfig(function=tuple(functions), workers=1), tokenizer, [prompt()]) as rewarder:
            assert rewarder.whole_batch == whole_batch


def test_batched_failures(score, write):
    path = write("""
        import time
        def odd(completions): return [1.0, None, float("nan"), "x", True]
        def short(completions): return [1.0] * (len(completions) - 1)
        def single(completions): return 1.0
        def mapping(completions): return dict.fromkeys(range(len(completions)), 1.0)
        def slow(completions): time.sleep(1000)
        """)
    scored = score([f"{path}:odd", "exact_match"], ["4"] * 5)
    assert [each.reward for each in scored if each.error is None] == [2, 1, 2]
    assert "returned float nan" in scored[2].error and "returned str 'x'" in scored[3].error
    with pytest.raises(UserError, match=r"mine.py:short returned 4 rewards for 5 completions: return one for each"):
        score(f"{path}:short", ["4"] * 5)
    for name, says, timeout in [
        ("single", "returned float 1.0, not a list of numbers", LONG),
        ("mapping", "returned dict", LONG),
        ("slow", "took longer than reward.timeout=0.5 seconds", 0.5),
    ]:
        assert all(f"{name}: {says}" in each.error for each in score(f"{path}:{name}", ["4"] * 2, timeout=timeout))


def test_order_and_workers(score, write, tmp_path):
    """Results belong to their completions however long each takes, and processes share the work: no call of three ends
    before the others have begun."""
    path = write(f"""
        import os, time
        def slow_first(completion, id):
            time.sleep(0.2 if id == "t:1/0/0" else 0)
            return float(completion)
        def process(completion):
            open(f"{tmp_path}/{{completion}}.begun", "w").close()
            while sum(name.endswith(".begun") for name in os.listdir("{tmp_path}")) < 3:
                time.sleep(0.01)
            return os.getpid()
        """)
    texts = [str(number) for number in range(40)]
    assert [each.reward for each in score(f"{path}:slow_first", texts, workers=3)] == list(range(40))
    assert len({each.reward for each in score(f"{path}:process", texts[:3], workers=3, timeout=LONG)}) == 3


def test_from_another_thread(score, write):
    """Time limits do not need the main thread, as alarms do."""
    path, found = write(FAULTS), []
    thread = threading.Thread(
        target=lambda: found.extend(score(f"{path}:one", ["sleep", "good", "good"], timeout=3.0, workers=1))
    )
    thread.start()
    thread.join(LONG)
    assert [each.reward for each in found][1:] == [4, 4] and math.isnan(found[0].reward)


# ----------------------------------------------------------------------------------------------------------- processes

CHILDREN = """
    import os, subprocess, sys
    def start(completion):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        with open({pids!r}, "a") as file:
            print(os.getpid(), child.pid, sep="\\n", file=file)
        if completion == "hang":
            import re
            re.match(r"(a+)+$", "a" * 60 + "b")
        if completion == "crash":
            os._exit(1)
        return 1.0
    """


def test_nothing_is_left_behind(score, write, tmp_path):
    pids = tmp_path / "pids"
    path = write(CHILDREN.format(pids=str(pids)))
    scored = score(f"{path}:start", ["ok", "hang", "crash"], timeout=3.0)
    assert [each.error is None for each in scored] == [True, False, False]
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 6 and gone(started)


def test_workers_end_with_a_parent_that_is_killed(write, tmp_path):
    """One that is idle, one in a call that never lets Python run, and what they started."""
    pids = tmp_path / "pids"
    path = write(CHILDREN.format(pids=str(pids)))
    script = f"""
        from isoloss.engine.rl.reward.pool import Call, RewardPool
        pool = RewardPool([{path + ":start"!r}], 2, 1000.0)
        pool.run([Call(0, {{"completion": "hang"}}), Call(0, {{"completion": "ok"}})])
        """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)]) as parent:
        all_there = lambda: pids.exists() and pids.read_text().count("\n") == 4
        until(all_there, "both workers had started a process", lambda: parent.poll() is None)
        started = [int(pid) for pid in pids.read_text().split()]
        assert all(psutil.pid_exists(pid) for pid in started)
        parent.kill()
    assert gone(started)


def test_the_environment_of_functions(score, write, capfd, monkeypatch):
    """One thread, no torch that nobody asked for, and what they print stays out of standard output."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    path = write("""
        import os, sys
        def f(completion):
            print("a word from the function", flush=True)
            heavy = {"torch", "megatron", "transformers", "numpy"} & set(sys.modules)
            return os.environ["OMP_NUM_THREADS"] == "1" and not heavy
        """)
    assert score([f"{path}:f", *BUILT_IN], ["4"])[0].parts["f"] == 1
    said = capfd.readouterr()
    assert "a word" in said.err and "a word" not in said.out


def test_closed_twice(tokenizer):
    rewarder = Rewarder(RewardConfig(), tokenizer, [prompt()])
    rewarder.close()
    rewarder.close()


def test_a_worker_that_is_killed_while_idle_is_replaced(tokenizer, completion):
    before = {child.pid for child in psutil.Process().children()}
    with Rewarder(RewardConfig(workers=1), tokenizer, [prompt()]) as rewarder:
        (worker,) = {child.pid for child in psutil.Process().children()} - before
        os.kill(worker, signal.SIGKILL)
        psutil.wait_procs([psutil.Process(worker)], timeout=LONG)
        scored = rewarder.score([prompt()] * 2, [completion("4"), completion("4", 1)])
        assert [each.reward for each in scored] == [1, 1]


def test_a_function_that_changes_during_the_run(tokenizer, completion, write):
    path = write(FAULTS)
    with Rewarder(RewardConfig(function=(f"{path}:one",), workers=1), tokenizer, [prompt()]) as rewarder:
        Path(path).write_text("def one(other): return 1")
        with pytest.raises(UserError, match=r"reward.function=\[.*mine.py:one\] changed in its files during the run"):
            rewarder.score([prompt()] * 2, [completion("_exit"), completion("good", 1)])


def test_a_fork_that_comes_back_does_not_answer_for_another(score, write):
    """Its answer would be taken for the next call's, and every reward after it would be another completion's."""
    path = write(
        """
        import os, time

        def forks(completion):
            if completion == "0":
                os.fork()
            return float(completion)
        """
    )
    texts = ["0", "1", "0", "2", "3", "4"]
    assert [each.reward for each in score(f"{path}:forks", texts)] == [float(text) for text in texts]


def test_a_hundred_faults_cost_their_completions_their_rewards_and_nothing_else(tmp_path):
    """Drawn by a seed: exceptions, time-outs, crashes, forks, what is no number (rl/reward_faults.py)."""
    found = reward_faults.campaign(5, 100, tmp_path)
    assert found.faults.total() == 100
    assert set(found.faults) == {*reward_faults.FAULTS, *reward_faults.HARMLESS}
    assert found.wrong == [] and found.errors == found.expected > 50
    assert found.left == []
    assert found.slowest < 20  # seconds of a batch, for each that its faults may take: no call wedges


# ---- code that a model wrote -----------------------------------------------------------------------------------------


def test_functions_do_not_know_the_key_of_the_servers(write, tokenizer, completion, monkeypatch):
    """Nor the address of our ranks; all else of the environment is theirs."""
    for name, value in (("SERVER_KEY", "secret"), ("MASTER_ADDR", "node0"), ("JUDGE_KEY", "judge")):
        monkeypatch.setenv(name, value)
    path = write("""
        import os
        def f(completion):
            assert "secret" not in str(dict(os.environ)) and "node0" not in str(dict(os.environ)), dict(os.environ)
            return os.environ["JUDGE_KEY"] == "judge"
        """)
    with Rewarder(RewardConfig((f"{path}:f",)), tokenizer, [prompt()], hidden="SERVER_KEY") as rewarder:
        (scored,) = rewarder.score([prompt()], [completion("x")])
    assert scored.error is None and scored.parts["f"] == 1


FORGED = """
import os, pickle, sys, time

class Program:
    def __reduce__(self):
        return open, ({mark!r}, "w")

def f(completion):
    text = {{"pickle": pickle.dumps(Program()) + b"\\n", "no json": b"\\xff\\n", "deep": b"[" * 100000 + b"\\n",
             "nan": b"NaN\\n", "object": b'{{"a": 1}}\\n', "nested": b"[[1]]\\n", "twice": b"1\\n1\\n", "half": b"1"}}
    if completion in text:
        os.write(int(sys.argv[2]), text[completion])
        time.sleep(60)
    return 1
"""


@pytest.mark.parametrize("forged", ("pickle", "no json", "deep", "nan", "object", "nested", "twice", "half"))
def test_a_forged_answer_costs_its_own_completion_only(forged, score, write, tmp_path):
    """Nothing of it is run, and none of it holds the run: half an answer ends with the time of the call."""
    mark = tmp_path / "mark"
    path = write(FORGED.format(mark=str(mark)))
    first, other = score(f"{path}:f", [forged, "fine"], timeout=2.0)
    says = "took longer than reward.timeout=2 seconds" if forged == "half" else "answered what is no reward"
    assert first.error is not None and says in first.error
    assert other.error is None and other.parts["f"] == 1
    assert not mark.exists()


def test_what_functions_print_stands_above_the_live_view(tmp_path, monkeypatch):
    (tmp_path / "printing.py").write_text("def score(completion):\n    print('scored', completion)\n    return 1.0\n")
    with terminal(monkeypatch, 80) as screen:
        part = LivePart()
        part.draw("the view", now=True)
        pool = RewardPool([f"{tmp_path}/printing.py:score"], 1, 100.0)
        assert pool.run([Call(0, {"completion": text}) for text in ("a", "b")]) == [1.0, 1.0]
        pool.close()
        assert screen.read() == ["scored a", "scored b", "the view", ""]
