"""Which answers `math` takes for right; values by hand."""

import pytest

from isoloss.engine.rl.reward.functions import exact_match
from isoloss.engine.rl.reward.math_answers import math

ROWS = {
    "the last that is called the answer, else the last expression": [
        ("The answer is 41. No, the answer is 42.", "42", 1),
        ("The answer is 42. No, the answer is 41.", "42", 0),
        ("First 42. The answer is 41", "42", 0),
        ("The final answer is $41$. I hope it is correct. No: the final answer is $42$", "42", 1),
        ("The answer is 42 dollars for 3 days", "42", 1),
        ("The answer to question 3 is 42", "42", 1),
        ("Answer = 41, no, **Answer**: 42 (see step 3)", "42", 1),
        ("I get 41, no, 42", "42", 1),
        ("So 42 is the answer.", "42", 1),
        ("so x = 42.", "x = 42", 1),
        ("It is 42 cm^2", "42", 1),
        (r"Thus $x \in [0, 1]$.", "[0,1]", 1),
        ("41+1=42\n#### 42", "42", 1),
    ],
    "an expression that stands alone, in plain text": [
        ("The answer is (1, 2).", "(1,2)", 1),
        ("The answer is (2, 1).", "(1,2)", 0),
        (r"\{2, 1\}", r"\{1,2\}", 1),
        (r"Answer: \sqrt{2}", r"\sqrt{2}", 1),
        ("Answer:42", "42", 1),
        ("x^2 + 1", "x^2+1", 1),
        ("x < 4", "x<3", 0),
        ("The answer is **B**.", "B", 1),
        ("The answer is C", "B", 0),
        (r"\dfrac{1}{2}", "1/2", 1),
    ],
    "boxes": [
        (r"\boxed{41} so \boxed {42}", "42", 1),
        (r"\boxed{41}, that is \fbox{42}", "42", 1),
        (r"\boxed{42} or \fbox{4", "42", 0),
        ("42", r"we try \boxed{41}, and have \boxed{42}", 1),
        ("41", r"we try \boxed{41}, and have \boxed{42}", 0),
        ("42", "The answer is $42$, found in $3$ steps.", 1),
    ],
    "percent, degrees, dollars, thousands, minus": [
        (r"\boxed{42\%}", "42%", 1),
        (r"\boxed{42\%}", "0.42", 1),
        (r"\boxed{41\%}", "42%", 0),
        ("42%", r"42\%", 1),
        (r"\boxed{120°}", r"120^\circ", 1),
        ("42", r"\$42", 1),
        (r"\boxed{12\,345}", "12345", 1),
        ("In 2020 100", "2020100", 0),
        ("It is −3.", "-3", 1),
        (r"\boxed{[0,∞)}", r"[0,\infty)", 1),
        ("√10", r"\sqrt{10}", 1),
    ],
    "powers of ten": [
        ("0.0000001", 1e-07, 1),
        ("2e-7", 1e-07, 0),
        ("It is 4.2e1.", "42", 1),
        (r"\boxed{6e23}", r"6 \cdot 10^{23}", 1),
        (r"\boxed{2e}", "2e", 1),
    ],
    "a whole completion, as functions of users may give it": [
        ("<think>so 42</think> I do not know", "42", 0),
        (r"<think>\boxed{42}</think> The answer is 41", "42", 0),
        (r"<think>\boxed{41}</think> \boxed{42}", "42", 1),
        (r"<think>\boxed{42}", "42", 0),
        ("41</think>42", "42", 1),
    ],
}


@pytest.mark.parametrize("kind", ROWS)
def test_what_is_right(kind):
    found = [(said, answer, math(said, answer)) for said, answer, _ in ROWS[kind]]
    assert found == ROWS[kind]


def test_exact_match_of_a_whole_completion():
    texts = {"<think>41</think>\n42": 1, "<think>42</think> 41": 0, "<think>42": 0, "42": 1}
    assert {text: exact_match(text, "42", "stop") for text in texts} == texts
    for answer in "", None:
        with pytest.raises(ValueError, match="no answer"):
            exact_match("", answer, "stop")
