"""Run a recipe or a tool by its subcommand.

isoloss sft model.path=DIR data.train=FILE              # one rank
torchrun --nproc_per_node 4 -m isoloss sft ...          # several
isoloss SUBCOMMAND --help
"""

import difflib
import pkgutil
import sys
from collections.abc import Sequence

from isoloss.parallel.runtime.program import COMMAND, version_line
from isoloss.tools.command.subcommands import BY_NAME, SUBCOMMANDS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return the exit status: that of the subcommand; 2 if there is no such subcommand."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] == "--version":
        print(version_line())
        return 0
    if words[0] not in BY_NAME:
        print(f"isoloss: error: {unknown(words[0])}", file=sys.stderr)
        return 2
    sys.argv = [f"{COMMAND} {words[0]}", *words[1:]]  # what the module reads, and what run.json records
    return pkgutil.resolve_name(f"{BY_NAME[words[0]].module}:main")()


def overview() -> str:
    """Return the list of subcommands."""
    lines = [f"  {each.name:<13} {each.text}" for each in SUBCOMMANDS]
    return "\n".join(
        [
            "usage: isoloss SUBCOMMAND ...",
            "",
            *lines,
            "",
            "isoloss SUBCOMMAND --help says more; isoloss --version prints versions.",
            "Several ranks: torchrun --nproc_per_node N -m isoloss SUBCOMMAND ...",
        ]
    )


def unknown(word: str) -> str:
    """Return the message for a word that is no subcommand."""
    if "=" in word or word.endswith((".yaml", ".yml")):
        return f"{word} stands where a subcommand must: isoloss sft {word if '=' in word else f'config={word}'}"
    near = difflib.get_close_matches(word.replace("_", "-"), BY_NAME, 1, 0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(BY_NAME)}"
    return f"there is no subcommand {word!r}; {hint}"


if __name__ == "__main__":
    sys.exit(main())
