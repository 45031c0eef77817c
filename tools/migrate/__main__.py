"""Translate a configuration of verl, TRL or slime into ours, and compare the two losses.

    python -m isoloss.tools.migrate verl run.sh
    python -m isoloss.tools.migrate verl config.yaml actor_rollout_ref.actor.ppo_mini_batch_size=128
    python -m isoloss.tools.migrate trl sft.yaml processes=8
    python -m isoloss.tools.migrate slime run.sh NUM_GPUS=8 --write mine.yaml
    python -m isoloss.tools.migrate verl run.sh --release 2026-01-01
    python -m isoloss.tools.migrate skyrl --release 2026-03-01 ranks=8 micro_batches=4

FILE is a launch script (verl, slime), YAML or JSON. After it stand more of the trainer's own arguments, which win, and
values of variables of a script. A script is read, never executed: what stands in an if, a case or a loop is passed
over.
Every key of the source is in one list: what changes the result, what you must give, translated, the same by default,
without a counterpart, unknown. What the source leaves to its defaults is translated too, where they are not ours.
--release DAY says what the loss of that day's release was divided by, and by which factor that was off. Of SkyRL,
ms-swift and NeMo-RL, whose configurations are not read, it is all that is said.
Exit status: 0 every key is accounted for, and none of those without a counterpart changes what is learned; 1 some keys
are unknown; 2 a mistake in the arguments or the file, or a combination that we refuse, in one line, before anything is
written; 3 the list "What changes the result" is not empty.
"""

import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import yaml

from isoloss.parallel import UserError
from isoloss.tools import command_line
from isoloss.tools.migrate import releases, slime, trl, verl
from isoloss.tools.migrate.result import Migration, migrate

WIDTH = 118  # of a report
READERS = {"verl": verl.read, "trl": trl.read, "slime": slime.read}


def main(argv: Sequence[str] | None = None) -> int:
    arguments, words = parser().parse_known_args(argv)
    try:
        release = releases.day(arguments.release) if arguments.release else None
        if arguments.trainer not in READERS:
            print(_past(arguments.trainer, release, arguments.words + words), end="")
            return 0
        path, words = _file(arguments.words + words)
        source, given, unread = READERS[arguments.trainer](path, words)
        if not given:
            where = path or "the command line"
            raise UserError(f"{where}: this is not a configuration of {source.trainer}: it has none of its keys")
        result = migrate(source, given, unread, release)
        if arguments.write is not None:
            if arguments.write.exists():
                raise UserError(f"--write {arguments.write}: exists already; remove it, or choose another name")
            arguments.write.write_text(preset(result, path.name if path else "a command line"))
        print(report(result, str(arguments.write) if arguments.write else None), end="")
        return result.status
    except (UserError, OSError) as error:
        return command_line.tell_mistake(error)


def parser() -> command_line.Parser:
    parser = command_line.parser("migrate", __doc__)
    parser.add_argument("trainer", choices=tuple(releases.NAMES), metavar="TRAINER",
                        help="whose: verl, trl or slime; with --release also skyrl, ms-swift or nemo-rl")  # fmt: skip
    parser.add_argument(
        "words", nargs="*", metavar="FILE | key=value", help="the configuration, and what is added to it"
    )
    parser.add_argument(
        "--write", type=Path, metavar="PRESET.yaml", help="write our keys there, as a preset of the recipe"
    )
    parser.add_argument(
        "--release", metavar="DAY", help="what the release of that day, YYYY-MM-DD, divided its loss by"
    )
    return parser


def _past(trainer: str, release: str | None, words: Sequence[str]) -> str:
    name = releases.NAMES[trainer]
    if release is None:
        raise UserError(f"{trainer}: isoloss reads no configurations of {name}; give --release DAY, and it says what "
                        "the loss of that day was divided by")  # fmt: skip
    return past_report(name, releases.describe(trainer, release, releases.sizes_of(words)))


def _file(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The first word is the file, unless it is an argument itself."""
    if words and not words[0].startswith("-") and "=" not in words[0]:
        return Path(words[0]), list(words[1:])
    return None, list(words)


# ---- the report and the preset ---------------------------------------------------------------------------------------


def report(result: Migration, written: str | None) -> str:
    """Return the report. written: the file that holds the keys instead, if any."""
    account = result.account
    if written is None:
        keys = [shlex.quote(line) for line in result.lines]
        start = [f"Keys for isoloss-{result.recipe}:", "", *keys]
    else:
        start = [
            f"Wrote {written}. Put it into recipes/conf/{result.recipe}/preset/ and start isoloss-{result.recipe} with "
            "preset=NAME, its name without .yaml.",
        ]
    parts = [
        _grouped("What changes the result", account.changes),
        "\n".join(start),
        _list("Give these before you run", result.before),
        _list("Not read, because it stands in another file", result.unread),
        _loss(result),
        _list("What your old run computed, by its release", result.past),
        _list("Translated", account.translated),
        _list(f"Not named: {result.trainer}'s defaults, which are not those of the preset", account.implied),
        _list("The same by default", account.same),
        _grouped("No counterpart, and what we do instead", account.without),
        _list("Unknown", account.unknown),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def past_report(name: str, lines: Sequence[str]) -> str:
    return _list(f"What a run of {name} computed", lines) + "\n"


def preset(result: Migration, origin: str) -> str:
    """Return a preset of the recipe. origin: the name of the source."""
    head = f"# @package _global_\n# From {origin}, a configuration of {result.trainer}.\n"
    return head + yaml.safe_dump(result.preset, sort_keys=False)


def _loss(result: Migration) -> str:
    lines = [f"{result.trainer}: {result.theirs.words()}", f"isoloss: {result.ours.words()}"]
    if result.differs:
        lines += [f"they differ: {why}" for why in result.differs]
        lines += [result.example] if result.example else []
    else:
        lines.append("the same number on every step, up to rounding")
    return _list("The loss, and the step", [*lines, *result.remarks])


def _grouped(title: str, pairs: Sequence[tuple[str, str]]) -> str:
    """List each reason once, with its keys."""
    reasons = dict.fromkeys(why for _, why in pairs)
    return _list(title, [f"{why}:\n{_keys([key for key, reason in pairs if reason == why])}" for why in reasons])


def _keys(keys: Sequence[str]) -> str:
    return "\n".join(f"      {key}" for key in keys)


def _list(title: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    return "\n".join([f"{title}:", "", *map(_wrapped, lines)])


def _wrapped(line: str) -> str:
    first, *rest = line.split("\n")
    filled = textwrap.fill(
        first, WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join([filled, *rest])


if __name__ == "__main__":
    sys.exit(main())
