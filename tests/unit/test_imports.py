"""Imports go one way, between folders and inside them; read from the source of every module, functions included."""

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import pytest

from isoloss.tools.dev.imports import (
    ALLOWED,
    INIT,
    Arrows,
    Import,
    Tree,
    circles,
    entry_of,
    main,
    measure,
    read,
    sources,
    upward,
)

ROOT = Path(__file__).parents[2]
# The entries of a folder from the bottom up, a level a string. An entry imports only from levels below its own: entries
# of one level do not know each other. "*" stands for all that are not named. A folder without a row has no order, only
# no circles.
ORDER = {
    "engine": ("config batching", "instruments memory", "data checkpoint", "step", "run", "sft rl"),
    "engine/rl": (
        "advantages.py agent_config.py prompt_ledger.py reference.py routes.py user_functions.py",
        "trajectory.py",
        "algorithms.py paths.py prompts.py",
        "config.py",
        "backends losses.py reward",
        "credit.py critic.py generation.py health.py in_flight.py",
        "agents",
        "rollout.py",
        "experience.py group_sampling.py",
        "setup.py",
        "report.py",
        "loop.py",
    ),
    "engine/rl/backends": ("protocol.py", "local servers", "sglang"),
    "models": (
        "rope.py",
        "kinds",
        "architecture.py",
        "weights",
        "families flops.py",
        "conversion mcore",
        "model.py",
        "lora",
    ),
    "models/kinds": (
        "mappings.py",
        "weight.py",
        "kind.py",
        "dense.py gated_delta.py grouped_query.py latent.py layer.py",
        "asymmetric.py experts.py",
        "dense_and_experts.py",
    ),
    "models/mcore": ("*", "layer_config.py", "layers", "moe patches.py", "gpt.py", "build.py"),
    "parallel": (
        "collectives.py runtime",
        "aggregation.py layout.py ops rank0.py",
        "mesh.py normalizer.py",
        "loss_head.py schedule.py sequence.py",
        "top_tokens.py",
        "ring.py",
        "attention.py",
        "head_exchange.py",
    ),
    # A command imports no other command, but for prove, which proves serve. What several need is in command_line.py,
    # or below tools/. Nothing that ships imports dev/.
    "tools": ("command_line.py", "*", "prove", "dev"),
}
# What each wing of models/ may import of the other wings: less than ORDER lets it.
WINGS = {"weights": set(), "families": {"weights"}, "mcore": {"weights"}, "conversion": {"families", "weights"}}
OPS = "parallel/ops/"  # the mathematics of a single device
GROUPS = ("torch.distributed", "isoloss.parallel.runtime.process_group")
PATCHES = "models/mcore/patches.py"
PARALLEL_STATE = "megatron.core.parallel_state"
# The second runs another project's library in an environment without isoloss.
TOUCH_PARALLEL_STATE = {"parallel/mesh.py", "tests/oracles/mbridge/make_hashes.py"}
TESTS = ("tests", "benchmarks")

Sources = Mapping[str, str]


def order_of_folders(tree: Tree, modules: Sources) -> Iterator[str]:
    yield from (f"{link}, against recipes, tools -> engine -> models -> parallel" for link in upward(tree))


def order_inside_folders(tree: Tree, modules: Sources) -> Iterator[str]:
    for folder, levels in ORDER.items():
        level_of = {entry: level for level, names in enumerate(levels) for entry in names.split()}
        entries = tree.arrows(folder).keys()
        rest = level_of.pop("*", None)
        if rest is None:
            yield from (f"{folder}/{entry} has no level in ORDER" for entry in entries - level_of.keys())
        yield from (f"{folder}/{entry} of ORDER does not exist" for entry in level_of.keys() - entries)
        for (start, end), links in tree.between(folder).items():
            if level_of.get(start, rest or 0) <= level_of.get(end, rest or 0):
                yield from (f"{link}: in {folder}/, {end} is not below {start}" for link in links)


def wings_of_models(tree: Tree, modules: Sources) -> Iterator[str]:
    for (wing, other), links in tree.between("models").items():
        if wing in WINGS and other in WINGS.keys() - WINGS[wing]:
            yield from (f"{link}: models/{wing} must not know models/{other}" for link in links)


def no_circles(tree: Tree, modules: Sources) -> Iterator[str]:
    """Of modules, or of the entries of a folder, which may be in a circle while their modules are in none."""
    links = {(importer, target): [link] for importer, target, link in tree.links}
    yield from (f"a circle of modules: {text}" for text in _circles(tree.modules, links))
    for folder in tree.folders():
        found = _circles(tree.arrows(folder), tree.between(folder))
        yield from (f"a circle in {folder or 'the root'}: {text}" for text in found)


def _circles(arrows: Arrows, links: Mapping[tuple[str, str], list[Import]]) -> Iterator[str]:
    """Each circle, with one import for each of its arrows."""
    for circle in circles(arrows):
        yield "; ".join(str(behind[0]) for ends, behind in links.items() if {*ends} <= {*circle})


def no_groups_in_ops(tree: Tree, modules: Sources) -> Iterator[str]:
    """Not even by `import torch` and `torch.distributed.all_reduce(...)`."""
    for link in tree.imports:
        if link.importer.startswith(OPS) and _is_in(link.name, *GROUPS):
            yield f"{link}: {OPS} knows no process group"
    for path, source in modules.items():
        nodes = ast.walk(ast.parse(source)) if path.startswith(OPS) else ()
        for node in nodes:
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
                yield f"{path}:{node.lineno} uses torch.distributed: {OPS} knows no process group"


def no_second_copy(tree: Tree, modules: Sources) -> Iterator[str]:
    """From the root of the repository `import engine` works, and makes each module a second time."""
    yield from (f"{link}: begin with isoloss." for link in tree.imports if link.name.split(".")[0] in ALLOWED)


def one_owner_of_parallel_state(tree: Tree, modules: Sources) -> Iterator[str]:
    for link in tree.imports:
        if _is_in(link.name, PARALLEL_STATE) and link.importer not in TOUCH_PARALLEL_STATE:
            yield f"{link}: only parallel/mesh.py touches it"


def one_file_of_patches(tree: Tree, modules: Sources) -> Iterator[str]:
    for path, source in modules.items():
        if path != PATCHES:
            yield from (f"{path}: only {PATCHES} patches Megatron: {text}" for text in patches(source))


def _is_in(name: str, *packages: str) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def patches(source: str) -> Iterator[str]:
    """Assignments to an attribute of something imported from Megatron, or to a private one of another object."""
    tree = ast.parse(source)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    megatron = {a.asname or a.name for n in nodes if str(n.module).startswith("megatron") for a in n.names}
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        flat = [t for target in targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])]
        for target in (t for t in flat if isinstance(t, ast.Attribute)):
            root = ast.unparse(target).split(".")[0]
            private = target.attr.startswith("_") and not target.attr.startswith("__")
            if root in megatron or (private and root not in ("self", "cls", "torch", "cuda")):
                yield ast.unparse(node)


RULES_OF_ALL = (no_second_copy, one_owner_of_parallel_state)
RULES = (
    *RULES_OF_ALL,
    order_of_folders,
    order_inside_folders,
    wings_of_models,
    no_circles,
    no_groups_in_ops,
    one_file_of_patches,
)


def test_the_product_keeps_every_rule():
    modules = sources(ROOT)
    tree = read(modules)
    found = [fault for rule in RULES for fault in rule(tree, modules)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", TESTS)
def test_tests_and_benchmarks_keep_those_that_are_for_them(folder):
    modules = sources(ROOT, [folder])
    assert modules
    tree = read(modules)
    found = [fault for rule in RULES_OF_ALL for fault in rule(tree, modules)]
    assert not found, "\n".join(found)


def product(changed: Sources) -> dict[str, str]:
    """The modules of a product that keeps every rule: an empty one for each entry of ORDER. Some are changed."""
    entries = [f"{folder}/{entry}" for folder, levels in ORDER.items() for level in levels for entry in level.split()]
    entries += [
        "recipes/sft.py",
        "tools/plan",
        "tools/prove",
        "models/mcore/stages.py",
        "parallel/ops/loss_head_kernels.py",
    ]
    named = [entry for entry in entries if not entry.endswith("*")]
    paths = [entry if entry.endswith(".py") else f"{entry}/{INIT}" for entry in named]
    packages = [f"{parent}/{INIT}" for path in paths for parent in list(PurePosixPath(path).parents)[:-1]]
    return dict.fromkeys([*paths, *packages], "") | dict(changed)


@pytest.mark.parametrize(
    ("rule", "changed"),
    [
        (order_of_folders, {"parallel/mesh.py": "from isoloss.models import rope"}),
        (order_of_folders, {"parallel/mesh.py": "def f():\n    import isoloss.engine"}),
        (order_of_folders, {"models/model.py": "from ..engine import step"}),
        (order_of_folders, {"engine/rl/loop.py": "from ...recipes import sft"}),
        (order_of_folders, {"recipes/sft.py": "from isoloss.tools import prove"}),
        (order_inside_folders, {"engine/memory/x.py": "from isoloss.engine.rl import config"}),
        (order_inside_folders, {"engine/memory/x.py": "def f():\n    from isoloss.engine.rl import config"}),
        (order_inside_folders, {"engine/sft/x.py": "from isoloss.engine import rl"}),  # of one level
        (order_inside_folders, {"engine/batching/x.py": "from .. import step"}),
        (order_inside_folders, {"engine/rl/reward/x.py": "from isoloss.engine.rl.rollout import Rollout"}),
        (order_inside_folders, {"engine/rl/backends/servers/x.py": "from isoloss.engine.rl.backends import sglang"}),
        (order_inside_folders, {"models/mcore/layers/x.py": "from isoloss.models.mcore.moe import router"}),
        (order_inside_folders, {"models/mcore/stages.py": "from isoloss.models.mcore import build"}),
        (order_inside_folders, {"models/mcore/x.py": "from isoloss.models.mcore import stages"}),
        (order_inside_folders, {"parallel/ops/x.py": "from isoloss.parallel.mesh import Mesh"}),
        (order_inside_folders, {"parallel/ops/x.py": "from isoloss.parallel import collectives, layout"}),
        (order_inside_folders, {"tools/plan/x.py": "from isoloss.tools.prove import INIT"}),
        (order_inside_folders, {"tools/plan/x.py": "from isoloss.tools.dev import imports"}),
        (order_inside_folders, {"tools/command_line.py": "import isoloss.tools.dev"}),
        (order_inside_folders, {"parallel/new.py": ""}),
        (order_inside_folders, {"engine/new/x.py": ""}),
        (wings_of_models, {"models/weights/x.py": "from isoloss.models import families"}),
        (wings_of_models, {"models/mcore/x.py": "from isoloss.models import families"}),
        (wings_of_models, {"models/conversion/x.py": "from isoloss.models.mcore import build"}),
        (no_circles, {"engine/step/x.py": "from . import y", "engine/step/y.py": "def f():\n    from .x import g"}),
        (no_circles, {"tools/prove/__init__.py": "from .x import A", "tools/prove/x.py": "from . import B"}),
        (
            no_circles,  # of folders, and of no modules
            {"engine/data/x.py": "from .. import checkpoint", "engine/checkpoint/y.py": "from ..data import x"},
        ),
        (no_groups_in_ops, {"parallel/ops/x.py": "import torch.distributed as dist"}),
        (no_groups_in_ops, {"parallel/ops/x.py": "from torch import distributed"}),
        (no_groups_in_ops, {"parallel/ops/x.py": "from torch.distributed import ProcessGroup"}),
        (no_groups_in_ops, {"parallel/ops/x.py": "import torch\ndef f(x):\n    torch.distributed.all_reduce(x)"}),
        (no_groups_in_ops, {"parallel/ops/x.py": "from isoloss.parallel.runtime.process_group import host_group"}),
        (no_second_copy, {"engine/step/x.py": "import models.gpt"}),
        (no_second_copy, {"tests/unit/x.py": "from engine.step import run_step"}),
        (one_owner_of_parallel_state, {"engine/step/x.py": "from megatron.core import parallel_state as mpu"}),
        (one_owner_of_parallel_state, {"models/model.py": "import megatron.core.parallel_state"}),
        (one_owner_of_parallel_state, {"tests/unit/x.py": "from megatron.core.parallel_state import get_rank"}),
        (one_file_of_patches, {"engine/step/x.py": "from megatron.core import optimizer\noptimizer.Adam = None"}),
        (one_file_of_patches, {"models/model.py": "from megatron.core.a import B\nB.__init__.__defaults__ = (None,)"}),
        (one_file_of_patches, {"engine/step/x.py": "def f(part):\n    part._move, other = None, 1"}),
    ],
)
def test_the_rule_finds(rule, changed):
    modules = product(changed)
    assert list(rule(read(modules), modules))


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"parallel/mesh.py": "from megatron.core import parallel_state\nfrom isoloss.parallel import layout"},
        {"engine/step/x.py": "from isoloss.models import rope\nfrom ..memory import INIT\nfrom . import y"},
        {"engine/rl/loop.py": "def f():\n    from ..step import INIT"},
        {"engine/__init__.py": "from isoloss.engine import rl"},  # a package knows what it holds
        {"models/conversion/x.py": "from isoloss.models.weights import INIT\nfrom isoloss.models import families"},
        {"models/mcore/moe/x.py": "from isoloss.models.mcore import layers, stages"},
        {"models/mcore/new.py": "from isoloss.models import flops"},
        {"parallel/ops/x.py": "import torch\nfrom isoloss.parallel import runtime\nfrom . import loss_head_kernels"},
        {"tools/prove/x.py": "import isoloss.engine.memory, toolshed\nfrom isoloss.recipes import sft"},
        {"tools/new/x.py": "from isoloss.tools import command_line"},
        {"tools/dev/x.py": "from isoloss.tools import plan"},
        {"models/mcore/patches.py": "from megatron.core import optimizer\noptimizer.Adam = None"},
    ],
)
def test_the_rule_lets_pass(changed):
    modules = product(changed)
    tree = read(modules)
    assert not [fault for rule in RULES for fault in rule(tree, modules)]


def test_an_entry_that_is_gone_leaves_the_order():
    modules = product({})
    del modules["parallel/ring.py"]
    assert list(order_inside_folders(read(modules), modules)) == ["parallel/ring.py of ORDER does not exist"]


SMALL = {
    "parallel/__init__.py": "from isoloss.parallel.mistakes import Mistake",
    "parallel/mistakes.py": "x = 1\ny = 2",
    "parallel/mesh.py": "def f():\n    from isoloss.parallel import Mistake",
    "models/__init__.py": "",
    "models/model.py": "import isoloss.parallel.mesh as mesh\nfrom isoloss import engine",
    "models/page.py": "from .wing import a, b\nfrom isoloss.models.model import Model",
    "models/wing/__init__.py": "",
    "models/wing/a.py": "import torch\nfrom . import b",
    "models/wing/b.py": "from ..model import Model\nif TYPE_CHECKING:\n    from isoloss.models.wing.a import A",
    "engine/__init__.py": "",
    "engine/x.py": "from isoloss.models.model import Model",
}


def test_measures_of_a_small_tree():
    tree = read(SMALL)
    assert tree.folders() == ["", "engine", "models", "models/wing", "parallel"]
    models, wing, parallel = (measure(tree, folder) for folder in ("models", "models/wing", "parallel"))
    # model.py, page.py and wing; page.py imports the two others, and wing the first.
    assert (models.entries, models.arrows, models.levels, models.circles) == (3, 3, 3, [])
    assert models.upward == ["models/model.py:2 imports isoloss.engine"]
    assert (models.doors, models.modules, models.lines) == (1, 6, 9)
    assert (models.one_importer, models.one_importer_lines) == (0, 0)
    assert (wing.entries, wing.arrows, wing.levels, wing.circles) == (2, 2, 1, [("a.py", "b.py")])
    assert (wing.doors, wing.modules) == (2, 3)
    # mesh.py has Mistake through the package, which counts for mistakes.py.
    assert (parallel.entries, parallel.arrows, parallel.levels) == (2, 1, 2)
    assert (parallel.doors, parallel.one_importer, parallel.one_importer_lines) == (1, 1, 2)
    assert measure(tree, "").upward == models.upward
    assert measure(tree, "").circles == [("engine", "models")]


def test_a_circle_is_one_step_of_the_longest_chain():
    modules = {"models/a.py": "from . import b", "models/b.py": "from . import c, d", "models/c.py": "from . import b"}
    tree = read(modules | {"models/d.py": "from . import e", "models/e.py": ""})
    assert measure(tree, "models").levels == 4  # a, the circle of b and c, d, e
    assert circles(tree.arrows("models")) == [("b.py", "c.py")]


def test_a_circle_of_three_is_found():
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": {"e"}}
    assert circles(arrows) == [("a", "b", "c"), ("e",)]


def test_an_entry_is_directly_inside():
    assert entry_of("engine/rl/loop.py", "engine") == "rl"
    assert entry_of("engine/rl/loop.py", "engine/rl") == "loop.py"
    assert entry_of("engine/rl/loop.py", "") == "engine"
    assert entry_of("engine/rl/__init__.py", "engine") == "rl"
    assert entry_of("engine/rl/__init__.py", "engine/rl") is None
    assert entry_of("engine/rl/loop.py", "engine/r") is None


def test_a_checkout_below_a_hidden_folder_is_read(tmp_path, capsys):
    root = tmp_path / ".hidden" / "checkout"
    for path in ("parallel/a.py", "parallel/.copies/b.py", "docs/c.py"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("from isoloss.parallel import b\n")
    assert sources(root) == {"parallel/a.py": "from isoloss.parallel import b\n"}
    main(["--root", str(root), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [(row["folder"], row["entries"], row["lines"]) for row in found["folders"]] == [
        ("", 1, 1),
        ("parallel", 1, 1),
    ]
    main(["--root", str(root)])
    assert "| parallel/ | 1 | 0 | 1 | 0 | 0 | 0 of 1 | 1 | 0 (0) |" in capsys.readouterr().out.splitlines()
