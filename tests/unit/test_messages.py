"""Messages of a row as templates take them, and turns that their owner says are not to be learned."""

import pytest

from isoloss.engine.data.messages import (
    as_named_by,
    check_messages,
    map_arguments,
    with_arguments_as_text,
)
from isoloss.parallel.runtime.errors import UserError

USER = {"role": "user", "content": "What?"}


def answer(**more: object) -> dict:
    return {"role": "assistant", "content": "That.", **more}


def calling(arguments: object) -> dict:
    return {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}],
    }


@pytest.mark.parametrize("field", ["weight", "train", "loss", "loss_mask"])
@pytest.mark.parametrize(("value", "learned"), [(0, False), (False, False), (0.0, False), (1, True), (True, True)])
def test_a_turn_of_weight_0_is_context(field, value, learned):
    found = check_messages([USER, answer(**{field: value}), USER, answer()], "messages", "r:1")
    assert found.learned == (False, learned, False, True)
    assert found.messages == [USER, answer(), USER, answer()]


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"weight": 0.5}, "`messages[1].weight` must be 0 (a turn that is not learned) or 1, not float 0.5"),
        ({"loss_mask": "0"}, "`messages[1].loss_mask` must be 0"),
        ({"train": [1, 0]}, "`messages[1].train` must be 0"),
        ({"weight": 1, "train": False}, "`messages[1]` has weight=1, train=False: give one"),
    ],
)
def test_other_weights_are_refused(weights, said):
    with pytest.raises(UserError) as error:
        check_messages([USER, answer(**weights)], "messages", "r:1")
    assert str(error.value).startswith(f"r:1: {said}")


@pytest.mark.parametrize(("field", "value"), [("train", False), ("weight", 0), ("loss_mask", 1)])
def test_a_part_of_a_turn_is_not_learned_apart(field, value):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", field: value}]
    with pytest.raises(UserError) as error:
        check_messages([USER, answer(content=parts)], "messages", "r:1")
    assert str(error.value).startswith(f"r:1: `messages[1].content[1].{field}` would not be obeyed")
    parts[1][field] = None
    assert check_messages([answer(content=parts)], "messages", "r:1").messages == [answer(content="ab")]


@pytest.mark.parametrize("empty", [{"content": ""}, {"content": " \n"}, {"content": "", "tool_calls": [], "name": "x"}])
def test_an_empty_turn_is_context(empty):
    found = check_messages([USER, {"role": "assistant"} | empty, USER, answer()], "messages", "r:1")
    assert found.learned == (False, False, False, True)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ('{"a": 1, "b": ["x"]}', {"a": 1, "b": ["x"]}),
        ("", {}),
        ({"a": None}, {"a": None}),
        (None, {}),
    ],
)
def test_arguments_that_are_json_text_become_an_object(given, taken):
    for message in (calling(given), {"role": "assistant", "tool_calls": [{"name": "f", "arguments": given}]}):
        (found,) = check_messages([message], "messages", "r:1").messages
        call = found["tool_calls"][0]
        assert call.get("function", call)["arguments"] == taken


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (calling('{"a": 1'), "`messages[0].tool_calls[0].function.arguments` is not JSON"),
        (calling("[1]"), "`messages[0].tool_calls[0].function.arguments` must be a JSON object, not list [1]"),
        (calling([1]), "`messages[0].tool_calls[0].function.arguments` must be a JSON object, not list [1]"),
        (calling(True), "`messages[0].tool_calls[0].function.arguments` must be a JSON object, not bool True"),
        (calling('"{}"'), "`messages[0].tool_calls[0].function.arguments` must be a JSON object, not str '{}'"),
        ({"role": "assistant", "tool_calls": "f()"}, "`messages[0].tool_calls` must be a list of calls"),
        ({"role": "assistant", "tool_calls": ["f()"]}, "`messages[0].tool_calls` must be a list of calls"),
        ({"role": "assistant", "tool_calls": [{"function": "f"}]}, "`messages[0].tool_calls` must be a list of calls"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}, "`messages[0].tool_calls` must be"),
        ({"role": "assistant", "tool_calls": [{"name": "", "arguments": {}}]}, "`messages[0].tool_calls` must be"),
    ],
)
def test_calls_that_are_none_are_refused(message, said):
    with pytest.raises(UserError) as error:
        check_messages([message], "messages", "r:1")
    assert said in str(error.value)


def test_arguments_become_text_for_templates_that_take_text():
    messages = check_messages([calling('{"a": "é"}'), answer()], "messages", "r:1").messages
    assert with_arguments_as_text(messages) == [calling('{"a": "é"}'), answer()]
    assert map_arguments({"name": "f"}, lambda arguments, where: 1 / 0) == {"name": "f"}


GENERIC = (
    "{% for m in messages %}{{ m.role + m['content'] }}{% if 'thinking' in m %}{{ m.thinking }}{% endif %}{% endfor %}"
)


def named(*messages: dict, template: str = GENERIC) -> list[dict]:
    return as_named_by(template, list(messages), "messages", "r:1")


def test_thoughts_have_the_name_that_the_template_has():
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert named(USER, answer(**{name: "hm"})) == [USER, answer(thinking="hm")]
        others = {other: "" for other in ("reasoning_content", "reasoning", "thinking") if other != name}
        assert named(answer(**{name: "hm"}, **others)) == named(answer(**others, **{name: "hm"}))
        assert named(answer(**{name: "hm"}, **others)) == [answer(thinking="hm")]
    both = GENERIC + "{{ m.reasoning_content }}"
    assert named(answer(thinking="a", reasoning_content="b"), template=both) == [
        answer(thinking="a", reasoning_content="b")
    ]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (answer(tool_calls=[{"name": "f"}]), "`messages[1].tool_calls` is not read by the chat template"),
        (answer(function_call={"name": "f"}), "`messages[1].function_call` is not read"),
        (answer(images=["a.png"]), "`messages[1].images` is not read"),
        (answer(content_type="html"), "`messages[1].content_type` is not read"),
        (answer() | {"role": "asistant"}, "`messages[1].role` is 'asistant', which the chat template does not name"),
        (answer() | {"role": "gpt"}, "`messages[1].role` is 'gpt'"),
        (answer(trainable=False), "`messages[1].trainable` is not read"),
        (answer(step_loss_mask=0), "`messages[1].step_loss_mask` is not read"),
        (answer(reasoning="a", thinking="b"), "`messages[1]` has several thoughts, reasoning, thinking"),
        (answer(thinking=["a"]), "`messages[1].thinking` must be text, not list"),
    ],
)
def test_what_the_template_does_not_read_is_refused_by_name(message, said):
    with pytest.raises(UserError) as error:
        named(USER, message)
    assert said in str(error.value)


def test_what_says_who_spoke_and_what_is_empty_may_be_left_out():
    kept = answer(name="a", id="1", tool_call_id="2", images=[], function_call={}, refusal="")
    assert named(USER, kept) == [USER, kept]
    assert named(answer() | {"role": "critic"}, template=GENERIC + "{% if m.role == 'critic' %}")[0]["role"] == "critic"
