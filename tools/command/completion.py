"""Print a script that completes subcommands, keys, their values, presets and files in a shell.

    isoloss completion bash >> ~/.bashrc
    isoloss completion zsh >> ~/.zshrc                                   # after compinit
    isoloss completion fish > ~/.config/fish/completions/isoloss.fish

The script asks `isoloss completion answer WORD...`, which imports no torch. Names with spaces are not completed.
"""

import sys
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from isoloss.tools import command_line
from isoloss.tools.command.subcommands import BY_NAME, SUBCOMMANDS, Subcommand

OPTIONS = ("--help", "--version")
PROGRAMS = " ".join(["isoloss", *(f"isoloss-{each.name}" for each in SUBCOMMANDS if each.has_script)])
# Bash takes what follows the last = or : for a word of its own, and a program by its path has the command next to it.
BASH = f"""\
_isoloss() {{
    local line=${{COMP_LINE:0:COMP_POINT}} program=isoloss IFS=$' \\t\\n'
    local -a words
    read -ra words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    local current=${{words[${{#words[@]}} - 1]}}
    [[ ${{words[0]}} == */* ]] && program=${{words[0]%/*}}/isoloss
    IFS=$'\\n'
    COMPREPLY=($("$program" completion answer "${{words[@]}}" 2>/dev/null))
    COMPREPLY=("${{COMPREPLY[@]#"${{current%"${{current##*[=:]}}"}}"}}")
    [[ ${{COMPREPLY[0]-}} == *[=/] ]] && compopt -o nospace
}}
complete -F _isoloss {PROGRAMS}
"""
ZSH = f"""\
_isoloss() {{
    local -a answers
    answers=("${{(@f)$(isoloss completion answer "${{(@)words[1,CURRENT]}}" 2>/dev/null)}}")
    compadd -Q -S '' -- ${{(M)answers:#*[=/]}}
    compadd -Q -- ${{answers:#(*[=/]|)}}
}}
compdef _isoloss {PROGRAMS}
"""
FISH = "".join(
    f"complete -c {program} -f -a '(isoloss completion answer (commandline -opc) (commandline -ct))'\n"
    for program in PROGRAMS.split()
)
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["answer"]:  # before argparse, which would take words of the line for its own
        print(*answers(words[1:]), sep="\n")
        return 0
    parser = command_line.parser("command.completion", __doc__)
    parser.add_argument("shell", choices=SCRIPTS)
    print(SCRIPTS[parser.parse_args(words).shell], end="")
    return 0


def answers(line: Sequence[str]) -> list[str]:
    """Return what the last word of a line may become. line: the program and its words, the last one unfinished."""
    program, *words = line
    name = Path(program).name.removeprefix("isoloss").lstrip("-")
    words = [*([name] if name else []), *words]
    if len(words) < 2:
        return _beginning(words[-1] if words else "", [*BY_NAME, *OPTIONS])
    subcommand, *before, word = words
    return _of_subcommand(BY_NAME[subcommand], before, word) if subcommand in BY_NAME else []


def _of_subcommand(subcommand: Subcommand, before: Sequence[str], word: str) -> list[str]:
    if subcommand.name == "completion":
        return _beginning(word, [*SCRIPTS, *OPTIONS])
    recipe = subcommand.recipe or next((each for each in before if BY_NAME.get(each, subcommand).recipe == each), None)
    key, equals, value = word.partition("=")
    if recipe is None and subcommand.words == "recipe":
        return _beginning(word, [*(each.name for each in SUBCOMMANDS if each.recipe), *OPTIONS])
    if recipe is None and subcommand.words == "others":
        return [*_beginning(word, OPTIONS), *_files(word)]
    if not equals:
        names = ("preset", "config", *_keys(recipe or "grpo"))
        groups = sorted({name.partition(".")[0] for name in names if "." in name})
        if before[-1:] in (["--help"], ["-h"]):
            return _beginning(word, groups)
        options = (*OPTIONS, "--cfg") if subcommand.recipe else OPTIONS
        return _beginning(word, [*(f"{name}=" for name in names), *options])
    return [f"{key}={each}" for each in _values(recipe or "grpo", key, value)]


def _beginning(word: str, candidates: Sequence[str]) -> list[str]:
    return [each for each in candidates if each.startswith(word)]


def _keys(recipe: str) -> dict[str, Any]:
    """Return the fields of a recipe's keys by name."""
    import dataclasses

    from isoloss.engine.config.schema import Config
    from isoloss.engine.rl.config import RLConfig

    def fields(cls: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        for field in dataclasses.fields(cls):
            if dataclasses.is_dataclass(field.type):
                yield from fields(field.type, f"{prefix}{field.name}.")
            else:
                yield f"{prefix}{field.name}", field

    return dict(fields(Config if recipe == "sft" else RLConfig, ""))


def _values(recipe: str, key: str, value: str) -> list[str]:
    """Return what the value of a key may become."""
    import isoloss.recipes
    from isoloss.parallel.runtime.config_key import choices_of

    if key == "preset":
        folder = Path(isoloss.recipes.__path__[0]) / "conf" / recipe / "preset"
        return _beginning(value, sorted(path.stem for path in folder.glob("*.yaml")))
    if key == "config":
        return _files(value, (".yaml", ".yml"))
    field = _keys(recipe).get(key)
    if field is None:
        return []
    begun = value[: max(value.rfind(sign) for sign in "[,") + 1]  # of a list
    kinds = set(_parts(field.type))
    if choices := choices_of(field) or (("true", "false") if bool in kinds else ()):
        return _beginning(value, [f"{begun}{choice}" for choice in choices])
    return [f"{begun}{path}" for path in _files(value[len(begun) :])] if str in kinds else []


def _parts(kind: Any) -> Iterator[Any]:
    """Yield a type and, of one such as `tuple[str | int, ...]`, all that it is made of."""
    yield kind
    for part in typing.get_args(kind):
        yield from _parts(part)


def _files(word: str, endings: tuple[str, ...] = ("",)) -> list[str]:
    """Return the folders, each with a / at its end, and the files that begin so."""
    folder, _, name = word.rpartition("/")
    parent = Path(f"{folder}/") if "/" in word else Path()
    try:
        found = sorted(path for path in parent.iterdir() if path.name.startswith(name))
    except OSError:
        return []
    head = f"{folder}/" if "/" in word else ""
    shown = [path for path in found if (name or not path.name.startswith(".")) and len(path.name.split()) == 1]
    return [f"{head}{path.name}/" for path in shown if path.is_dir()] + [
        f"{head}{path.name}" for path in shown if not path.is_dir() and path.name.endswith(endings)
    ]


if __name__ == "__main__":
    sys.exit(main())
