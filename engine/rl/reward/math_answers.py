"""The built-in reward function `math`, in a file of its own so that the library is imported before any call is timed.

A worker loads this file by its path, without the package around it.
"""

import logging
import re
from fractions import Fraction

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off

BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{")
# How people and models write what math-verify reads otherwise, or not at all.
SCIENTIFIC = re.compile(r"(?<![\w.\\])(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][+-]?[0-9]{1,2}(?!\w)")
SPACE = r"(?:\\[,;:! ]|[~ \u00a0\u202f])"
THOUSANDS = re.compile(rf"(?<![0-9.])[0-9]{{1,3}}(?:{SPACE}[0-9]{{3}})+(?![0-9])")
ROOT = re.compile(r"√\s*([0-9]+|\w)")
SIGNS = str.maketrans({"−": "-", "°": r"^\circ ", "∞": r"\infty ", "~": " "})
# What says the answer; and a word that math-verify takes for such in any other place.
LEAD = re.compile(r"\banswer\b[\s*]*(?:\bis\b[\s*]*:?|:|=)|####", re.IGNORECASE)
ANSWER = re.compile("answer", re.IGNORECASE)
WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}|\n|[0-9]\s+[0-9]")


def math(completion_final: str, answer: object) -> float:
    """1 where math-verify finds the last box of the completion's answer equal to the row's; without a box, what follows
    the last "answer is", "answer:" or ####; without these, the last expression.

    answer: a number, an expression as LaTeX or plain, or a solution that ends in \\boxed{}, $...$ or #### (GSM8K).
    """
    text = tidied("" if answer is None else str(answer).rpartition("####")[2].strip())
    box = last_box(text)
    if box is not None or not re.search(r"(?<!\\)\$", text):
        text = boxed(text if box is None else box)
    # Its time limits are alarms; the limit of a call is the pool's.
    gold = parse(text, parsing_timeout=0)
    if not gold:
        raise ValueError(f"math-verify finds no expression in the answer {str(answer)[:60]!r}")
    # A function of the user's may give it a whole completion.
    final = completion_final.rpartition("</think>")[2]
    said = [] if "<think>" in final else said_in(final)
    return float(any(verify(gold, parse(each, parsing_timeout=0), timeout_seconds=None) for each in said))


def said_in(text: str) -> list[str]:
    """Return the answer in a text, in forms of which math-verify reads each."""
    text = tidied(text)
    box = last_box(text)
    if box is not None:
        return [boxed(box)]
    leads = list(LEAD.finditer(text))
    # math-verify takes the first expression that follows such a lead, and the last of a text without one.
    last = text[leads[-1].start() :] if leads else ""
    said = last if last and parse(last, parsing_timeout=0) else ANSWER.sub("", text)
    return [said, *_alone(text[leads[-1].end() :] if leads else text)]


def _alone(text: str) -> list[str]:
    """A text that is one expression, in a box: where it is not LaTeX math-verify reads only numbers of a text."""
    text = text.strip(" \t\n*`\"'").removesuffix(".").strip("*`\"'")
    return [] if "$" in text or WORDS.search(text) else [boxed(text)]


def last_box(text: str) -> str | None:
    """Return the content of the last \\boxed{...}: math-verify reads several boxes as one set. "" if it is not
    closed; None without a box."""
    found = list(BOX.finditer(text))
    if not found:
        return None
    inside, depth = text[found[-1].end() :], 1
    for end, letter in enumerate(inside):
        escaped = end > 0 and inside[end - 1] == "\\"
        depth += 0 if escaped else (letter == "{") - (letter == "}")
        if depth == 0:
            return inside[:end]
    return ""


def boxed(expression: str) -> str:
    """In a box; a percentage as math-verify knows it, which equals 42, 42% and 0.42."""
    number, percent = re.subn(r"\s*\\?%\s*$", "", expression)
    return f"${number}$%" if percent else f"\\boxed{{{expression}}}"


def tidied(text: str) -> str:
    text = THOUSANDS.sub(lambda found: re.sub(SPACE, "", found[0]), ROOT.sub(r"\\sqrt{\1}", text))
    # As fractions, for math-verify rounds decimals to six digits.
    return SCIENTIFIC.sub(lambda found: str(Fraction(found[0])), text).translate(SIGNS)
