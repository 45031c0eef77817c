"""Try a chat template within limits. A script: python template_render.py DESCRIPTOR SECONDS BYTES CHARACTERS

Imports jinja2 and the standard library alone. Renders like transformers as far as time and memory are concerned.
DESCRIPTOR: an open file with the template. Exit status 70: more than BYTES or CHARACTERS; a signal: more than SECONDS.
"""

import datetime
import os
import resource
import sys
from typing import Any, ClassVar

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

USER, ASSISTANT = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes"}
CALL = {"type": "function", "id": "call00001", "function": {"name": "look", "arguments": {"at": "it"}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
FOUND = {"role": "tool", "name": "look", "tool_call_id": "call00001", "content": "Hello"}
LOOK = {"type": "function", "function": {"name": "look", "description": "looks", "parameters": {}}}
TALKS: tuple[dict[str, Any], ...] = (
    {"messages": [USER, ASSISTANT], "tools": None},
    {"messages": [{"role": "system", "content": "Speak"}, USER], "tools": None, "add_generation_prompt": True},
    {"messages": [USER, CALLED, FOUND, ASSISTANT], "tools": [LOOK]},
)


class Generation(Extension):
    """Parses {% generation %}, which marks the assistant's words for transformers; renders its body alone."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def refuse(message: str) -> None:
    raise ValueError(message)


def main() -> None:
    descriptor, seconds, most_bytes, most_characters = map(int, sys.argv[1:])
    with open(descriptor, "rb") as file:
        file.seek(0)
        text = file.read().decode()
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = datetime.datetime.now().strftime
    for talk in TALKS:
        try:
            made = 0
            for piece in environment.from_string(text).generate(**talk, bos_token="", eos_token=""):
                made += len(piece)
                if made > most_characters:
                    raise MemoryError
        except MemoryError:
            os._exit(os.EX_SOFTWARE)
        except Exception:  # other errors are reported when a row is rendered
            continue
    os._exit(0)


if __name__ == "__main__":
    main()
