# One verb each. Every target starts from a fresh machine: it makes .venv and installs what the project's files name.

PYTHON ?= python3
# The build of PyTorch to install: the default is what was tested. On a machine without a GPU give pip the CPU build,
# for instance with PIP_EXTRA_INDEX_URL set to PyTorch's CPU wheel index; a plain install fetches gigabytes of CUDA.
TORCH ?= torch==2.13.0
# Ranks of a local run: one a GPU, two on a CPU.
NPROC ?= $(shell nvidia-smi -L 2>/dev/null | wc -l | sed 's/^0$$/2/')
ARGS ?=
# For `make test-newer`: what the newer Megatron-Core wants.
PYTHON312 ?= python3.12
NEWER := megatron-core==0.17.1
# Where `make test-newer-cpu` runs: the tests of what releases of Megatron-Core have in different forms.
NEWER_FILES := tests/unit/test_compat.py tests/unit/test_rotary.py tests/unit/test_grouped_experts.py tests/numerics/test_optimizer_steps.py
# Processes that run the tests; those that need ranks, or share something expensive, stay together.
WORKERS ?= 2

# Where Python writes no bytecode, every process of a test compiles all of isoloss again.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
# One thread a rank on a CPU: ranks already use the cores.
ONE_THREAD := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}
RUN := $(ONE_THREAD) $(BIN)/torchrun --nproc_per_node $(NPROC)
PYTEST := $(ONE_THREAD) $(BIN)/pytest
# Installs what follows into the environment of that name: $(call INSTALL,.venv) torch
INSTALL = $(1)/bin/python tools/dev/install.py
# Its chat templates, which tests render; nothing imports it.
TEMPLATES := trl==1.16.0
# What tests load exported adapters with, and what it imports.
PEFT := peft==0.21.2 accelerate==1.15.0
PARALLEL := -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

# The model that `make grpo` and `make dapo` start from: fine-tuned on careless demonstrations, once for both.
SORT := runs/sft-sort
# The model that `make serve` serves, fine-tuned once, and where recipes of the cookbook run against it.
CHAT := runs/sft-chat
# The folder of a run: the one that ARGS names, else the newest of its recipe.
RUN_FOLDER = $(or $(patsubst output_dir=%,%,$(filter output_dir=%,$(ARGS))),$$(ls -td runs/$@-*/ | head -n 1))

.PHONY: help install environments sft grpo dapo agent serve tinker-sl tinker-rl test test-newer test-newer-cpu newer test-all coverage mutants fresh-mutants chaos soak slowest budget test-docs test-sglang test-tinker prove-all bench bench-rl lint links types docs clean
.DEFAULT_GOAL := help

help:
	@echo "make sft        supervised fine-tuning of a small model on the shipped text; ARGS='train.steps=20 ...' overrides keys"
	@echo "make grpo       reinforcement learning (GRPO) of a small model that was fine-tuned first, with its reward curve"
	@echo "make dapo       the same with DAPO: dynamic sampling, clip-higher, overlong shaping"
	@echo "make agent      an agent that needs a tool: demonstrations first, then GRPO over several turns"
	@echo "make serve      a server of the Tinker API with a small model that was fine-tuned first; make tinker-sl, make tinker-rl:"
	@echo "                recipes sl_loop and rl_basic of the tinker-cookbook against it, from another terminal"
	@echo "make test       the quick CPU tests: every claim once, ten minutes on two cores"
	@echo "make test-all   those and the others;  make slowest: the slowest tests of the last run;  make budget: what they may take"
	@echo "make test-newer   the quick tests with $(NEWER), in an environment of its own, if there is a Python 3.12"
	@echo "make test-newer-cpu   of them those of what releases have in different forms, if PyTorch's CPU build is at hand"
	@echo "make mutants    one-line bugs, planted one at a time: the tests must notice each; make coverage: branches that tests take"
	@echo "make fresh-mutants   300 such bugs drawn at random: which rows notice them?"
	@echo "make chaos      kills, signals, damaged files, failing disks and networks: real runs must survive them (20 minutes);  make soak: an hour"
	@echo "make test-docs  every command of README.md and docs, as it is written there"
	@echo "make test-sglang  the same client against a real SGLang server, on a CPU, in an environment of its own"
	@echo "make test-tinker  isoloss-serve with the real clients: Tinker's SDK, in an environment of its own"
	@echo "make prove-all  what both leave of the grids: every layout, mode and token budget (an hour and a half)"
	@echo "make bench      side-by-side measurements;  make bench-rl: of a GRPO step, with TRL in an environment of its own"
	@echo "make lint       ruff;  make types: pyright;  make docs: the documentation as a site, into site/"

install: .venv/.ready

# torch goes first: a dependency that asks for it would otherwise choose the build.
.venv/.ready: setup.py pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "isoloss needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(call INSTALL,.venv) $(TORCH) -c constraints.txt
	$(call INSTALL,.venv) -e '.[dev]' -c constraints.txt
	$(call INSTALL,.venv) --no-deps $(TEMPLATES) $(PEFT)
	touch $@

# All that .ci/run uses.
environments: install .venv/.docs .sglang-venv/.ready .tinker-venv/.ready

sft: install
	$(RUN) -m isoloss.recipes.sft $(ARGS)

grpo dapo: install
	@if [ -d $(SORT)/hf ]; then echo "$(SORT)/hf is there: not fine-tuned again"; \
	else $(RUN) -m isoloss.recipes.sft preset=sort output_dir=$(SORT) checkpoint.resume=true; fi
	$(RUN) -m isoloss.recipes.$@ $(ARGS)
	@$(BIN)/python -m isoloss.tools.reward_curve "$(RUN_FOLDER)"

agent: install
	$(ONE_THREAD) $(BIN)/python -m isoloss.recipes.minimal_agent runs/agent $(ARGS)
	@$(BIN)/python -m isoloss.tools.reward_curve "$$(ls -td runs/agent/rl*/ | head -n 1)"

serve: install
	@if [ -d $(CHAT)/hf ]; then echo "$(CHAT)/hf is there: not fine-tuned again"; \
	else $(RUN) -m isoloss.recipes.sft preset=chat output_dir=$(CHAT) checkpoint.resume=true; fi
	$(ONE_THREAD) $(BIN)/python -m isoloss.tools.serve preset=chat $(ARGS)

# Recipes of the cookbook as they are, in a folder with tokenizer and data, against the server of `make serve`.
COOKBOOK := cd tests && $(ONE_THREAD) ../$(BIN)/python -m support.serve.cookbook
tinker-sl: install .tinker-venv/.ready
	$(COOKBOOK) sl_loop $(ARGS)

tinker-rl: install .tinker-venv/.ready
	$(COOKBOOK) rl_basic $(ARGS)

test: install
	$(PYTEST) $(PARALLEL) -m 'not full and not slow and not sglang and not tinker and not docs' $(ARGS)

test-all: install
	$(PYTEST) $(PARALLEL) $(ARGS)

# The quick tests with a newer Python and Megatron-Core, beside .venv. PyTorch's build for the CPU comes as above.
IS_312 = import sys; print("yes" if sys.version_info >= (3, 12) else "")
test-newer:
	@$(if $(shell $(PYTHON312) -c '$(IS_312)' 2>/dev/null),$(MAKE) newer,\
	echo "$(PYTHON312) is no Python 3.12: nothing was run; make test-newer PYTHON312=... names one")

# Of these NEWER_FILES, and only if it costs no download of gigabytes.
test-newer-cpu:
	@if $(PYTHON312) -m pip --quiet install --dry-run --ignore-installed --no-deps --only-binary=:all: $(TORCH)+cpu 2>/dev/null; \
	then $(MAKE) test-newer TORCH=$(TORCH)+cpu ARGS='$(NEWER_FILES)'; \
	else echo "$(PYTHON312) and $(TORCH)+cpu for it are not both at hand: nothing was run"; fi

newer: .venv312/.ready
	$(ONE_THREAD) .venv312/bin/pytest $(PARALLEL) -m 'not full and not slow and not sglang and not tinker and not docs' $(ARGS)

.venv312/.ready: setup.py pyproject.toml constraints.txt
	test -x .venv312/bin/python || $(PYTHON312) -m venv .venv312
	sed 's/^megatron-core==.*/$(NEWER)/' constraints.txt > .venv312/constraints.txt
	$(call INSTALL,.venv312) $(TORCH) -c .venv312/constraints.txt
	$(call INSTALL,.venv312) -e '.[dev]' -c .venv312/constraints.txt
	$(call INSTALL,.venv312) --no-deps $(TEMPLATES) $(PEFT)
	touch $@

# Branches of what trains, ranks and subprocesses included.
COVERED := $(CURDIR)/engine,$(CURDIR)/models,$(CURDIR)/parallel
coverage: install
	$(BIN)/coverage erase
	$(ONE_THREAD) $(BIN)/coverage run --source=$(COVERED) -m pytest $(PARALLEL) --timeout 900 $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# One-line bugs, planted one at a time in a copy: the tests must notice each.
mutants: install
	$(ONE_THREAD) $(BIN)/python tests/mutants/run.py $(ARGS)

# Bugs that nobody thought of. ARGS='--seed 7 --slow': others, and what rows of make prove-all notice of the survivors.
fresh-mutants: install
	$(ONE_THREAD) $(BIN)/python tests/mutants/fresh.py .fresh-mutants.toml $(ARGS)

# Real runs, disturbed in every way: ARGS='--seed 3 --kinds sft' tries one seed of one kind of run, --rounds 5 more.
chaos: install
	cd tests && $(ONE_THREAD) ../$(BIN)/python -m chaos.run $(ARGS)

soak: install
	cd tests && $(ONE_THREAD) ../$(BIN)/python -m chaos.soak $(ARGS)

slowest:
	cd tests && ../$(BIN)/python -m support.suite.durations

# What the last run of the tests took, against tests/budget.toml. ARGS="--write 'WHY'" makes it the budget.
budget:
	cd tests && ../$(BIN)/python -m support.suite.budget $(ARGS)

test-docs: install
	$(PYTEST) $(PARALLEL) -m docs --timeout 1800 $(ARGS)

# A real SGLang server on this CPU; `pytest -m sglang` has one of every family. Its dependencies contradict ours, so it
# has an environment of its own. One process: two servers that start at once on two cores pass the time that a start
# may take.
test-sglang: install .sglang-venv/.ready
	$(PYTEST) -m 'sglang and not slow' --timeout 1200 $(ARGS)

# isoloss-serve with the real clients, Tinker's SDK and recipes, in an environment of their own.
test-tinker: install .tinker-venv/.ready
	$(PYTEST) -m 'tinker and not slow' $(ARGS)

.tinker-venv/.ready: tests/serve/requirements.txt
	test -x .tinker-venv/bin/python || $(PYTHON) -m venv .tinker-venv
	$(call INSTALL,.tinker-venv) $(TORCH) -c constraints.txt
	$(call INSTALL,.tinker-venv) --no-deps -r $<
	touch $@

.sglang-venv/.ready: tests/sglang/requirements.txt
	test -x .sglang-venv/bin/python || $(PYTHON) -m venv .sglang-venv
	$(call INSTALL,.sglang-venv) $(TORCH) -c constraints.txt
	$(call INSTALL,.sglang-venv) --no-deps -r $<
	touch $@

prove-all: install
	$(PYTEST) $(PARALLEL) -m 'slow and not sglang and not tinker' $(ARGS)

bench: install
	for script in benchmarks/*.py; do echo "== $$script"; OMP_NUM_THREADS=1 $(BIN)/python $$script || exit 1; done

# A GRPO step beside TRL's, whose environment stands apart from ours.
bench-rl: install .trl-venv/.ready
	$(ONE_THREAD) $(BIN)/python benchmarks/rl_step.py $(ARGS)

.trl-venv/.ready: benchmarks/rl_sides/requirements.txt constraints.txt
	test -x .trl-venv/bin/python || $(PYTHON) -m venv .trl-venv
	$(call INSTALL,.trl-venv) $(TORCH) -c constraints.txt
	$(call INSTALL,.trl-venv) -r $< -c constraints.txt
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Type checkers, and what reads docstrings, do not see through the editable install's import hook: they get links.
links:
	mkdir -p .links/isoloss
	for folder in engine models parallel recipes tools; do ln -sfn ../../$$folder .links/isoloss/$$folder; done
	for file in __init__ __main__; do ln -sfn ../../tools/command/isoloss/$$file.py .links/isoloss/$$file.py; done

types: install links
	$(BIN)/pyright --pythonpath $(BIN)/python

# The documentation as a site. A link or an anchor that leads nowhere is an error.
docs: .venv/.docs links
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html"

.venv/.docs: .venv/.ready
	$(call INSTALL,.venv) -e '.[docs]' -c constraints.txt
	touch $@

clean:
	rm -rf .venv .venv312 .sglang-venv .tinker-venv .trl-venv .uv .links build site *.egg-info
