"""Which form a row has, and columns that would be passed over."""

import pytest

from isoloss.engine.data.columns import WHY_NOT, check_columns, form_of, unused
from isoloss.parallel.runtime.errors import UserError

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"messages": TALK}, ("messages",)),
        ({"prompt": "a", "completion": "b"}, ("prompt", "completion")),
        ({"text": "a"}, ("text",)),
        ({"messages": TALK, "prompt": "a", "prompt_id": 7}, ("messages",)),
        ({"text": "a", "completion": "b"}, ("text",)),
    ],
)
def test_the_form_of_a_row(row, form):
    assert form_of(row, "r:1") == form


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": TALK, "text": "a b"}, "this one has `messages` and `text`"),
        ({"prompt": "a", "completion": "b", "text": "a b"}, "this one has `prompt` + `completion` and `text`"),
        ({"prompt": "a", "completion": "b", "messages": TALK}, "this one has `messages` and `prompt` + `completion`"),
        ({"conversations": []}, "unknown kind of row (keys: conversations)"),
    ],
)
def test_a_row_of_several_forms_or_none_is_refused(row, said):
    with pytest.raises(UserError) as error:
        form_of(row, "r:1")
    assert str(error.value).startswith("r:1: ") and said in str(error.value)


@pytest.mark.parametrize("name", WHY_NOT)
def test_a_column_that_could_change_what_is_learned_is_refused_unless_it_is_empty(name):
    for empty in (None, "", [], {}):
        check_columns({"messages": TALK, name: empty}, "r:1")
    with pytest.raises(UserError) as error:
        form_of({"messages": TALK, name: ["x"]}, "r:1")
    assert str(error.value).startswith(f"r:1: `{name}` would not be seen by the model: {WHY_NOT[name]}")
    with pytest.raises(UserError, match=f"`{name.title()}`"):
        check_columns({"messages": TALK, name.title(): "x"}, "r:1")


def test_columns_that_say_nothing_to_the_model_are_listed():
    assert unused({"id": 1, "messages": TALK, "tools": [], "source": "x"}) == ["id", "source"]
    assert unused({"text": "a", "completion": "b"}) == ["completion"]
