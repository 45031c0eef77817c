"""What tools.migrate reads of a launch script is what a shell would hand to the trainer."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from isoloss.parallel import UserError
from isoloss.tools.migrate.reading import arguments_of, flags, script, value_of

SCRIPT = r"""#!/usr/bin/env bash
set -xeuo pipefail
# A comment (with a parenthesis and an 'apostrophe
lower=8  # and another
half=$((lower / 2)); both=$(( (lower + half) * 1024 - 1 ))
NAME=${NAME:-"${FOLDER:-/data}/models/Qwen"}
export KEPT=${GIVEN:-not this}
EMPTY=
WITH_DEFAULT=${EMPTY:-filled} WITHOUT=${EMPTY-filled}
ITEMS=(
    --first "$NAME/x y"   # --not-this 1
    --second='single $NAME'
    # --neither 2
    --flag
)
ITEMS+=(--third ${both})
NONE=()
MORE="--fourth 4 --fifth"
if [ "$lower" -gt 100 ]; then
    ITEMS+=(--from-an-if 1)
    lower=9
fi
case "$lower" in
    8) ITEMS+=(--from-a-case 1) ;;
esac
echo "unrelated; train.py is not run here" | cat > /dev/null
$RUN train.py \
    --zero ${lower} \
    "${ITEMS[@]}" ${NONE[@]} $MORE \
    --list "['$NAME/a', '$NAME/b']" --escaped \"q\" "$@"
"""
PROGRAM = re.compile(r"(^|/)train\.py$")


@pytest.fixture
def launch(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    return path


def test_the_arguments_are_those_that_bash_hands_over(launch):
    """The if is false, and what stands in the case is not read on purpose: bash is asked without it."""
    bash = shutil.which("bash")
    assert bash is not None
    text = SCRIPT.replace("8) ITEMS+=(--from-a-case 1) ;;", "9) true ;;").replace("set -xeuo", "set -euo")
    text = text.replace("$RUN train.py", "printf '%s\\n'")
    done = subprocess.run([bash, "-c", text], text=True, capture_output=True, check=True, env={"GIVEN": "kept"})
    read = script(launch, {"GIVEN": "kept"})
    assert arguments_of(read, PROGRAM) == done.stdout.splitlines()
    assert read.variables["KEPT"] == "kept"
    assert (read.variables["WITH_DEFAULT"], read.variables["WITHOUT"]) == ("filled", "")


def test_a_variable_of_the_user_wins_and_what_has_no_value_keeps_its_name(launch):
    words = arguments_of(script(launch, {"FOLDER": "/other", "lower": "6"}), PROGRAM)
    assert words[:5] == ["--zero", "6", "--first", "/other/models/Qwen/x y", "--second=single $NAME"]
    assert str((6 + 3) * 1024 - 1) in words
    launch.write_text("A=$(date)\npython train.py --a $A --b ${B}\n")
    assert arguments_of(script(launch, {}), PROGRAM) == ["--a", "$(date)", "--b", "${B}"]


def test_a_file_beside_the_script_is_read_where_the_script_computes_its_folder(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models/small.sh").write_text("MODEL=(--num-layers 2)\n")
    (tmp_path / "run.sh").write_text(
        'D="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\nsource "${D}/models/small.sh"\n'
        'source "${D}/models/absent.sh"\npython3 train.py ${MODEL[@]}\n'
    )
    read = script(tmp_path / "run.sh", {})
    assert arguments_of(read, PROGRAM) == ["--num-layers", "2"]
    assert len(read.unread) == 1 and "absent.sh" in read.unread[0]


def test_flags_have_no_value_one_or_several():
    words = ["--on", "--lr", "1e-6", "--eval", "aime", "a.jsonl", "--off=false", "--low", "-1"]
    assert flags(words) == {"--on": True, "--lr": 1e-6, "--eval": ["aime", "a.jsonl"], "--off": False, "--low": -1}


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-6", 1e-6), ("3", 3), ("True", True), ("null", None), ("None", None), ("[a,b]", ["a", "b"]), ("'x'", "x"),
     ("a: b", {"a": "b"}), ("", None), ("token-mean", "token-mean"), ("[a", "[a")],
)  # fmt: skip
def test_a_value_of_a_command_line(text, value):
    assert value_of(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "python3 train.py \\\n  --zero 1 \\\n  --last 2\n  --lost 3 \\\n  --more 4\n",
        "ITEMS=(--lost 3)\npython3 train.py --last 2\n${ITEMS[@]} \\\n  --more 4\n",
        "torchrun train.py trainer.first=1 trainer.last=2\n  +trainer.lost=3\n",
    ],
    ids=["a flag", "an array", "a key"],
)
def test_a_launch_line_that_ends_for_want_of_a_backslash_is_named(text, tmp_path):
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(UserError, match=r"for want of a backslash: '.*lost.* never reach"):
        arguments_of(script(tmp_path / "run.sh", {}), PROGRAM)


@pytest.mark.parametrize("after", ["echo --done", "DONE=1", "| tee log", "2>&1", "data=3", "pkill -9 python"])
def test_a_command_after_the_launch_is_not_its_arguments(after, tmp_path):
    (tmp_path / "run.sh").write_text(f"python3 train.py --last 2\n{after}\n")
    assert arguments_of(script(tmp_path / "run.sh", {}), PROGRAM) == ["--last", "2"]


def test_the_folder_of_the_shell_is_that_of_the_command(tmp_path):
    (tmp_path / "run.sh").write_text("python3 train.py --a $PWD/a --b ${PWD}/b --c $HOME/c\n")
    words = arguments_of(script(tmp_path / "run.sh", {"HOME": "/home/me"}), PROGRAM)
    assert words == ["--a", f"{Path.cwd()}/a", "--b", f"{Path.cwd()}/b", "--c", "/home/me/c"]
