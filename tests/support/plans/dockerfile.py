"""A Dockerfile as its instructions, by stage: as much of the format as ours uses."""

import re
from dataclasses import dataclass
from pathlib import Path

INSTRUCTIONS = ("ARG", "COPY", "ENV", "FROM", "RUN", "SHELL", "WORKDIR")


@dataclass(frozen=True)
class Instruction:
    """stage: the name of the one that it stands in; "" before the first."""

    stage: str
    word: str
    text: str


def read(path: Path) -> list[Instruction]:
    """Raises ValueError for what is no instruction of INSTRUCTIONS."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    stage, found = "", []
    for line in filter(None, re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()):
        word, _, text = line.partition(" ")
        if word not in INSTRUCTIONS:
            raise ValueError(f"{path}: {line!r} is no instruction")
        if word == "FROM":
            stage = text.split(" AS ")[1]
        found.append(Instruction(stage, word, text))
    return found


def parents(instructions: list[Instruction]) -> dict[str, str]:
    """The name of each stage, and what it starts from."""
    return {each.stage: each.text.split(" AS ")[0] for each in instructions if each.word == "FROM"}


def arguments(instructions: list[Instruction]) -> set[tuple[str, str]]:
    """Name and default of every ARG."""
    return {tuple(each.text.split("=", 1)) for each in instructions if each.word == "ARG"}
