"""What the command lines of tools/ share: a mistake is one line with status 2, and --help shows the docstring."""

import pytest

from isoloss.tools import reward_curve
from isoloss.tools.dev import configuration, make_tasks, make_tiny
from isoloss.tools.doctor import __main__ as doctor
from isoloss.tools.plan import __main__ as plan
from isoloss.tools.prove import __main__ as prove


@pytest.mark.parametrize(
    ("tool", "argv", "says"),
    [
        (configuration, ["--to", "page.md"], "--to"),
        (make_tasks, ["--task", "none", "--out", "somewhere"], "'carry', 'sort'"),
        (make_tiny, [], "--out"),
        (plan, ["sft"], "--gpus"),
        (prove, ["--budgets", "few"], "--budgets: invalid token_budgets value: 'few'"),
        (prove, ["--precision", "fp8"], "'fp32', 'fp64'"),
        (reward_curve, [], "RUN"),
    ],
)
def test_a_mistake_in_the_arguments_is_one_line(tool, argv, says, capsys):
    with pytest.raises(SystemExit) as ended:
        tool.main(argv)
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == "" and err.count("\n") == 1
    assert err.startswith("isoloss: error: ") and says in err and "--help" in err


@pytest.mark.parametrize("tool", [configuration, doctor, make_tasks, make_tiny, plan, prove, reward_curve])
def test_help_shows_the_docstring_of_the_tool(tool, capsys):
    with pytest.raises(SystemExit) as ended:
        tool.main(["--help"])
    out = capsys.readouterr().out
    assert (
        ended.value.code == 0
        and out.startswith(f"usage: python -m {tool.__name__.removesuffix('.__main__')} ")
        and tool.__doc__ in out
    )
