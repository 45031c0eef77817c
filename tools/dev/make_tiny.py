"""Make the small real-text data set, tokenizer and model configuration that ship with the recipes.

    python -m isoloss.tools.dev.make_tiny --out recipes/assets/tiny

The text is CPython's own documentation, which every CPython carries: the language reference in `pydoc_data.topics`
and the docstrings of the standard library. Nothing is downloaded. The same CPython gives the same bytes; another
version has other documentation, so the shipped files are the reference and this module is how they came about.
"""

import ast
import hashlib
import importlib
import inspect
import json
import re
import shutil
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from isoloss.recipes.launch import ASSETS
from isoloss.tools import command_line

PASSAGE_CHARS = 800
LEAST_CHARS = 60
PARAGRAPH_CHARS = 60  # normalised characters from which a paragraph that occurs twice counts as a copy
EVAL_ROWS = 200
EVAL_DOCUMENT_ROWS = 25  # a document larger than this stays in train, so that eval spans many documents
TRAIN_BYTES = 2_700_000
VOCAB_SIZE = 2048
END_OF_TURN, START_OF_TURN, PADDING = "<|im_end|>", "<|im_start|>", "<|endoftext|>"

# Tests, other people's packages, demonstrations, and trees whose documentation is a table rather than English.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "turtledemo", "encodings", "pydoc_data", "site-packages"}

# C modules, under the name that a user imports. Python's own source covers the rest.
C_MODULES = {"builtins": "builtins", "math": "math", "cmath": "cmath", "itertools": "itertools", "time": "time",
             "array": "array", "select": "select", "mmap": "mmap", "zlib": "zlib", "binascii": "binascii",
             "unicodedata": "unicodedata", "fcntl": "fcntl", "gc": "gc", "marshal": "marshal", "sys": "sys",
             "posix": "os", "_io": "io", "_collections": "collections", "_functools": "functools", "_socket": "socket",
             "_struct": "struct", "_thread": "threading", "_random": "random", "_bisect": "bisect", "_heapq": "heapq",
             "_csv": "csv", "_signal": "signal", "_contextvars": "contextvars", "_weakref": "weakref",
             "_asyncio": "asyncio", "_queue": "queue", "resource": "resource"}  # fmt: skip

PUNCTUATION = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "--", "…": "...", "\xa0": " "})

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Question:
    """A question and its answer. `document` (a topic or a top-level module) is never divided between the splits."""

    document: str
    question: str
    answer: str


# ---------------------------------------------------------------------------------------------------------------- text


def documentation() -> Iterator[tuple[str, str, str]]:
    """Yield (document, question, text) of every topic, Python module and C module, in a fixed order."""
    topics = importlib.import_module("pydoc_data.topics").topics
    for name in sorted(topics):
        yield f"topic {name}", f"Explain the language topic '{name}'.", topics[name]
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if not SKIPPED_FOLDERS & set(path.relative_to(library).parts):
            yield from source_docstrings(path, path.relative_to(library))
    for name, public in C_MODULES.items():
        yield from object_docstrings(importlib.import_module(name), public, f"module {public}")


def source_docstrings(path: Path, relative: Path) -> Iterator[tuple[str, str, str]]:
    """Yield docstrings of public names, without imports: some standard modules open windows or print when imported."""
    parts = list(relative.with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    if not parts or not all(part.isidentifier() for part in parts):
        return
    source = path.read_text(encoding="utf-8", errors="replace")
    # Some modules came with notices of their own; only text that the PSF licence alone covers is taken.
    if any("copyright" in line.lower() and "Python Software Foundation" not in line for line in source.splitlines()):
        return
    name = ".".join(parts).replace("posixpath", "os.path")
    document = "module " + name.split(".")[0]
    tree = ast.parse(source)
    yield document, f"What is the Python module {name} for?", ast.get_docstring(tree) or ""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and is_public(child.name):
                full, is_class = f"{prefix}.{child.name}", isinstance(child, ast.ClassDef)
                yield document, question_about(full, is_class), ast.get_docstring(child) or ""
                if is_class:
                    yield from walk(child, full)

    yield from walk(tree, name)


def object_docstrings(owner, public: str, document: str, depth: int = 0) -> Iterator[tuple[str, str, str]]:
    """Yield docstrings of a C module's functions, classes and methods."""
    for name, value in sorted(vars(owner).items()):
        value = getattr(value, "__func__", value)  # static and class methods
        text, is_class = getattr(value, "__doc__", None), isinstance(value, type)
        if not isinstance(text, str) or not is_public(name) or not (is_class or callable(value)):
            continue
        full = f"{public}.{name}".removeprefix("builtins.")
        yield document, question_about(full, is_class), inspect.cleandoc(text)
        if is_class and depth == 0:
            yield from object_docstrings(value, full, document, depth + 1)


def is_public(name: str) -> bool:
    return not name.startswith("_")


def question_about(name: str, is_class: bool) -> str:
    return f"What is the class {name}?" if is_class else f"What does {name} do?"


# ---------------------------------------------------------------------------------------------------------------- rows


def normalised(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "", text.lower())


def long_paragraphs(text: str) -> set[str]:
    keys = (normalised(paragraph) for paragraph in text.split("\n\n"))
    return {key for key in keys if len(key) >= PARAGRAPH_CHARS}


def passages(text: str) -> list[str]:
    """Cut `text` at paragraphs into pieces of at most PASSAGE_CHARS; a longer paragraph is left out."""
    pieces: list[str] = []
    for paragraph in text.split("\n\n"):
        if len(paragraph) > PASSAGE_CHARS or not paragraph.strip():
            continue
        if pieces and len(pieces[-1]) + 2 + len(paragraph) <= PASSAGE_CHARS:
            pieces[-1] += "\n\n" + paragraph
        else:
            pieces.append(paragraph.strip("\n"))
    return [textwrap.dedent(piece).strip() for piece in pieces]


def make_rows() -> list[Question]:
    """Make rows without copies: a long paragraph is used once, by the first text that has it.

    The language topics quote one another at length (`specialnames` holds `customization` whole), and a method inherits
    its docstring; copies would put eval text into train.
    """
    rows, seen_texts, seen_paragraphs = [], set(), set()
    for document, question, text in documentation():
        text = text.translate(PUNCTUATION).replace("\t", "    ")
        fresh = [p for p in text.split("\n\n") if not long_paragraphs(p) & seen_paragraphs]
        seen_paragraphs |= long_paragraphs(text)
        pieces = passages("\n\n".join(fresh))
        for part, piece in enumerate(pieces, 1):
            letters = sum(c.isalpha() or c == " " for c in piece)
            if len(piece) < LEAST_CHARS or not piece.isascii() or letters < 0.6 * len(piece):
                continue
            if normalised(piece) in seen_texts:
                continue
            seen_texts.add(normalised(piece))
            suffix = f" (part {part} of {len(pieces)})" if len(pieces) > 1 else ""
            rows.append(Question(document, question + suffix, piece))
    return rows


def split(rows: list[Question]) -> tuple[list[Question], list[Question]]:
    """Return (train, eval), each of whole documents, which are ranked by a hash of their name, not by chance."""
    by_document: dict[str, list[Question]] = {}
    for row in rows:
        by_document.setdefault(row.document, []).append(row)
    ranked = sorted(by_document, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    held_out: list[Question] = []
    for name in ranked:
        if len(held_out) < EVAL_ROWS and len(by_document[name]) <= EVAL_DOCUMENT_ROWS:
            held_out += by_document.pop(name)
    train, size = [], 0
    for name in ranked:
        for row in by_document.get(name, []):
            size += len(json_line(row))
            if size <= TRAIN_BYTES:
                train.append(row)
    return train, held_out


def json_line(row: Question) -> str:
    messages = [{"role": "user", "content": row.question}, {"role": "assistant", "content": row.answer}]
    return json.dumps({"messages": messages}) + "\n"


# --------------------------------------------------------------------------------------------------------------- files


def train_tokenizer(train: list[Question], out: Path) -> None:
    """Train a byte-level BPE of VOCAB_SIZE on the train split only."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PADDING, START_OF_TURN, END_OF_TURN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f"{row.question}\n{row.answer}" for row in train), trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the text gave {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    save_tokenizer(tokenizer, out)


def save_tokenizer(tokenizer, out: Path) -> None:
    """Write a tokenizer of the library `tokenizers` as a Hugging Face folder has it, with CHAT_TEMPLATE."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(out)
    # transformers 5 writes class and key names that version 4 (and servers built on it) cannot read; both read these.
    config_file = out / "tokenizer_config.json"
    config = json.loads(config_file.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["additional_special_tokens"] = [START_OF_TURN]
    config_file.write_text(json.dumps(config, indent=2) + "\n")


def main(argv: list[str] | None = None) -> None:
    """Write train.jsonl, eval.jsonl, the tokenizer, LICENSE.txt and a copy of the shipped config.json into --out."""
    parser = command_line.parser("dev.make_tiny", __doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder to write; its files of the same names are replaced"
    )
    out = parser.parse_args(argv).out
    out.mkdir(parents=True, exist_ok=True)
    train, held_out = split(make_rows())
    for name, rows in (("train", train), ("eval", held_out)):
        (out / f"{name}.jsonl").write_text("".join(json_line(row) for row in rows), encoding="ascii")
        print(f"{name}: {len(rows)} rows of {len({row.document for row in rows})} documents")
    train_tokenizer(train, out)
    (out / "config.json").write_bytes((ASSETS / "tiny" / "config.json").read_bytes())
    shutil.copyfile(Path(sysconfig.get_path("stdlib")) / "LICENSE.txt", out / "LICENSE.txt")


if __name__ == "__main__":
    main()
