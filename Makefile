# A fresh machine needs python3 (3.11 to 3.13, with venv), git and make; the rest comes into .venv, in the versions of
# constraints.txt. What is installed is remembered in .venv/.installed-*, so set-up takes no time when nothing changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 4
# Distributions of their own in this repository, each with its pyproject.toml and its tests. They use the core; it does not know them.
SATELLITES := conform dashboard science
LINKS := build/types/moebius $(SATELLITES:%=build/types/moebius_%)
# A file stays on one worker, for its tests share what is costly to make. Files go out in their order: sorted by their
# number of tests, those with few and long tests would come last and leave the other workers idle.
# Their bytecode is kept, whatever the environment says: tests start hundreds of processes.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# Runs the tests of a mark. What failed beside others runs once more, alone; one that passes there is listed, and is still
# a fault to mend.
marked = $(PYTEST) --durations=10 -m $(1) || { [ $$? -eq 1 ] && OMP_NUM_THREADS=1 $(BIN)/python -m pytest --last-failed --last-failed-no-failures none --maxfail 1 -rp -m $(1); }

# What numbers depend on. `rounding` takes those that show most in the least time.
NUMERIC := tests/model tests/kernels tests/distributed tests/train tests/evaluation tests/planning/test_simulate.py tests/test_family.py
ROUNDING := tests/model tests/kernels/test_slots.py tests/kernels/fused tests/distributed/dispatch tests/distributed/test_loop_depth.py \
	tests/distributed/placement tests/train/test_parity.py
# Ways to compute that a processor may have or lack. What it lacks, its libraries ignore.
VARIANTS := MOEBIUS_TEST_ROW_ORDER=1 ONEDNN_MAX_CPU_ISA=AVX2 ONEDNN_MAX_CPU_ISA=AVX512_CORE MKL_CBWR=COMPATIBLE MKL_CBWR=AVX2 MKL_CBWR=AVX512 \
	ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2

.NOTPARALLEL:
.PHONY: help train test test-slow test-all test-conform test-dashboard rounding variants nightly chaos chaos-run kernels range oldest mutants lint docs wheel clean

help:  ## show this
	@echo "moebius: expert-parallel pretraining of Mixture-of-Experts Universal Transformers"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1 - \2/p' Makefile
	@echo "  PYTHON=python3.12 before the target's name chooses the Python (now: $(PYTHON))"

train: $(VENV)/.installed-cluster  ## prepare, train, evaluate, break and resume a small run on a simulated cluster
	$(BIN)/moebius submit smoke

test: $(VENV)/.installed-cluster $(VENV)/.installed-test  ## run the core's tests except the slow ones, on four processes (WORKERS=8: on eight)
	$(call marked,'not slow and not nightly')

test-slow: $(VENV)/.installed-cluster $(VENV)/.installed-test  ## run the core's other tests: the slow ones, and those of recorded data beside the project
	$(call marked,'(slow or needs_shared) and not nightly')

test-all: test test-slow $(SATELLITES:%=test-%)  ## run the tests of the core and of its satellites, the slow ones too, except those of `make nightly`

test-conform: $(VENV)/.installed-satellites  ## run the tests of satellites/conform/, the slow ones too
	$(PYTEST) -m '' satellites/conform/tests

test-dashboard: $(VENV)/.installed-satellites  ## run the tests of satellites/dashboard/, in a browser too if there is one
	$(PYTEST) -m '' satellites/dashboard/tests

test-science: $(VENV)/.installed-satellites  ## run the tests of satellites/science/, the slow ones too
	$(PYTEST) -m '' satellites/science/tests

rounding: $(VENV)/.installed-cluster $(VENV)/.installed-test  ## run numeric tests as on processors whose sums depend on the number of rows
	MOEBIUS_TEST_ROW_ORDER=1 $(PYTEST) $(ROUNDING)

variants: $(VENV)/.installed-cluster $(VENV)/.installed-test  ## run all numeric tests with every instruction set that this processor has
	for variant in $(VARIANTS); do echo "== $$variant"; env $$variant $(PYTEST) $(NUMERIC) || exit 1; done

nightly: variants  ## run what takes too long for every change: the tests marked so, and `make variants`
	$(PYTEST) --durations=10 -m nightly tests

chaos: $(VENV)/.installed-cluster $(VENV)/.installed-test  ## run all tests of the failure matrix F1-F30 and show it
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.report

chaos-run: $(VENV)/.installed-cluster $(VENV)/.installed-test  ## shoot at a small job at random, and compare (CHAOS="--minutes 20 --seed 7")
	$(BIN)/python -m tests.chaos.run $(CHAOS)

kernels: $(VENV)/.installed-cluster $(VENV)/.installed-test  ## compile every Triton kernel for seven kinds of GPUs and look at what came out
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "slow or nightly" tests/kernels/triton/test_compiles.py

range: $(VENV)/.installed-cluster $(VENV)/.installed-test  ## compile the front end of every Triton kernel with the oldest and the newest Triton
	$(BIN)/python .ci/versions.py triton

oldest: $(VENV)/.installed-cluster $(VENV)/.installed-test  ## run the fast tests with the oldest and the newest versions of all dependencies (12 GB)
	for which in oldest newest; do $(BIN)/python .ci/versions.py $$which $(PYTHON) -n $(WORKERS) --dist loadfile --no-loadscope-reorder || exit 1; done

mutants: $(VENV)/.installed-cluster $(VENV)/.installed-test  ## break the code in places and see that the tests notice
	$(BIN)/python tests/mutants.py

lint: $(VENV)/.installed-satellites $(VENV)/.installed-lint $(LINKS)  ## check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/basedpyright --pythonpath $(BIN)/python --project tests/pyrightconfig.json

# The type checker does not see an editable install. It finds the packages by these links, whatever the checkout's folder
# is called.
build/types/moebius:
	mkdir -p $(@D)
	ln -s ../.. $@

build/types/moebius_%:
	mkdir -p $(@D)
	ln -s ../../satellites/$* $@

docs: $(VENV)/.installed-docs  ## build the documentation's site into build/site; a dead link or a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "open build/site/index.html"

wheel: $(VENV)/.installed-build  ## build the wheels of the core and its satellites, and try them in empty environments
	$(BIN)/python .ci/wheel.py

clean:  ## remove the environment and all that was built; runs stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The satellites bring the core's extras for tests along, because their tests run in the same environment.
$(VENV)/.installed-satellites: $(SATELLITES:%=satellites/%/pyproject.toml) constraints.txt | $(VENV)/.installed-cluster $(VENV)/.installed-test
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(foreach name,$(SATELLITES),-e './satellites/$(name)[test]')
	@touch $@

# One stamp per extra of pyproject.toml, so that none is installed twice, in whatever order the targets are called.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(VENV)/.made
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || { echo "there is no $(PYTHON) here: install Python 3.11, 3.12 or 3.13, or name it: make PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else "moebius needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is %s; name another one: make PYTHON=..." % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make an environment; Debian and Ubuntu have venv in the package python3-venv" >&2; exit 1; }
	@touch $@
