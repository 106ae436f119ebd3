SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# In the versions of the lock file, where an index has them.
INSTALL := $(BIN)/python -m pip install --no-compile --editable '.[dev]'
# Nearly all that a process imports, of the packages in the environment.
COMPILED := torch sympy mpmath megatron numpy pydantic
PYTEST := $(BIN)/pytest --durations=10 -rs
# Test files at a time: one more than cores, as some tests mostly wait.
JOBS ?= 3
# In the order of tests/conftest.py: xdist's own, by the number of tests, has those files last that take longest.
BY_FILE := --dist loadfile --no-loadscope-reorder
# Files that start many ranks.
RANKS := --numprocesses 2 $(BY_FILE) tests/parallel
# One more for the jobs of a scheduler, which wait most of the time.
LONG_JOBS ?= 4

# Tests start hundreds of processes, and pytest compiles all test files: once, wherever bytecode is not kept by default.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install check check-types check-others audit wheel fuzz test test-skipped test-long test-soak test-eval test-trl gpu-check bundle twin twin-budgets quickstart golden lock docs clean

install: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: lightscale needs Python 3.11 or newer, '$(PYTHON)' is $$($(PYTHON) --version 2>&1);" \
	       "name another with 'make PYTHON=python3.11 ...'" >&2; exit 1; }
	@echo "installing into $(VENV); a first time takes about two minutes, most of them for PyTorch"
	@mkdir -p $(VENV) && date +%s > $(VENV)/.began
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@{ $(INSTALL) --constraint tools/constraints.txt || { \
	  echo "not all of the locked versions are to be had here: installing the newest that fit"; $(INSTALL); }; \
	} | sed -u '/already satisfied/d'
	@echo "compiling the packages of every process to bytecode, on all cores; the others are when they are imported"
	@cd $(VENV)/lib/python*/site-packages && "$(CURDIR)/$(BIN)/python" -m compileall -q -j 0 $(COMPILED) > /dev/null || true
	@echo $$(($$(date +%s) - $$(cat $(VENV)/.began))) > $@

CHECKED := tests/test_layering.py tests/test_safety.py
# Static checks, dependencies, the direction of imports, and that nothing that is read can be executed; two at a time.
check: install
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=line check-types check-others

check-types:
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy -p lightscale
	$(BIN)/mypy tools tests/twin
	MYPYPATH=docs/_ext $(BIN)/mypy -p lightscale_site

check-others:
	$(BIN)/python tools/dependencies.py
	$(BIN)/pytest -q $(CHECKED)
	@$(MAKE) --no-print-directory audit

# Known weaknesses of the locked versions, where an index answers; the program is in an environment of its own, so that
# none of its packages is one of ours.
AUDIT_VENV := .venv-audit
audit:
	@test -x $(AUDIT_VENV)/bin/pip-audit || { $(PYTHON) -m venv $(AUDIT_VENV) && timeout 120 $(AUDIT_VENV)/bin/python \
	  -m pip install --quiet --retries 1 --timeout 10 pip-audit cyclonedx-bom; } > /dev/null 2>&1 || true
	@$(BIN)/python tools/dependencies.py --audit $(AUDIT_VENV)/bin/pip-audit

# The wheel, and beside it what it was tested with, as CycloneDX.
wheel: install audit
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(AUDIT_VENV)/bin/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml --output-format JSON \
	  --output-file dist/lightscale.cdx.json $(BIN)/python

# Every reader of what others wrote, led by coverage: SECONDS_EACH of each. Findings are in build/fuzz.
FUZZ_VENV := .venv-fuzz
SECONDS_EACH ?= 60
fuzz:
	test -x $(FUZZ_VENV)/bin/python || $(PYTHON) -m venv $(FUZZ_VENV)
	$(FUZZ_VENV)/bin/python -m pip install --quiet --editable '.[dev,fuzz]' --constraint tools/constraints.txt
	$(FUZZ_VENV)/bin/python tools/readers/fuzz_readers.py --seconds $(SECONDS_EACH) --out build/fuzz-readers.json

# The default suite; a part that fails does not keep the next from running.
test: check
	failed=0; \
	$(PYTEST) --numprocesses $(JOBS) $(BY_FILE) $(addprefix --ignore ,tests/parallel $(CHECKED)) || failed=1; \
	$(PYTEST) $(RANKS) || failed=1; \
	exit $$failed

# Those that were skipped for want of a program, once it is there. Exit code 5 says that there is none.
test-skipped: install
	$(PYTEST) --skipped --numprocesses $(JOBS) $(BY_FILE) || test $$? -eq 5

# The rest: tests marked `long`; with SHARE=8 an eighth of each file's, drawn anew each time. Jobs of a scheduler mostly
# wait, so the others run beside them; those that measure speed run by themselves. Exit code 5 says that there is none.
SHARE ?= 1
LONG := 'long and not soak' --share $(SHARE)
ALONE := tests/tools/benchmarks $(addprefix tests/data_pipeline/preparation/,estimates dedup filters)
test-long: install
	failed=0; \
	$(PYTEST) -m $(LONG) --numprocesses $(LONG_JOBS) $(BY_FILE) \
	  $(addprefix --ignore ,tests/parallel $(ALONE)) || test $$? -eq 5 || failed=1; \
	$(PYTEST) -m $(LONG) $(RANKS) || test $$? -eq 5 || failed=1; \
	$(PYTEST) -m $(LONG) $(ALONE) || test $$? -eq 5 || failed=1; \
	exit $$failed

# The full counts of restarts and faults: about an hour. And all cases of the products of which a run draws some.
DRAWN := $$(grep --recursive --files-with-matches '"drawing.py"' tests --include 'test_*.py')
test-soak: install
	$(PYTEST) -m soak
	LIGHTSCALE_TEST_SEED=all $(PYTEST) -m 'not soak and not gpu and not twin' --numprocesses $(JOBS) --dist loadfile $(DRAWN)

# With lm-eval, in an environment of its own: it needs a package (chardet) whose licence `make check` does not allow.
EVAL_VENV := .venv-eval
test-eval: install
	test -x $(EVAL_VENV)/bin/python || $(PYTHON) -m venv $(EVAL_VENV)
	$(EVAL_VENV)/bin/python -m pip install --quiet --editable '.[dev,eval]' --constraint tools/constraints.txt
	$(EVAL_VENV)/bin/pytest -rs tests/evaluation/harness tests/evaluation/tasks tests/tools/benchmarks/test_evaluate.py \
	  'tests/docs/test_tutorials.py::test_page[to-transformers]'

# Gradients beside TRL's trainers, in an environment of its own: its packages pin versions of others.
TRL_VENV := .venv-trl
test-trl: install
	test -x $(TRL_VENV)/bin/python || $(PYTHON) -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/python -m pip install --quiet --editable '.[dev]' 'trl==1.16.*' --constraint tools/constraints.txt
	$(TRL_VENV)/bin/python -c 'import datasets, transformers, trl'
	$(TRL_VENV)/bin/pytest -rs -m 'long or not long' tests/exchange/test_trl.py

# What only a GPU can show: correctness on the device, then speed, kept in benchmarks; `PARTS=kernels` for one part,
# `SMALL=1` for sizes that take seconds.
gpu-check: install
	$(BIN)/python tools/gpu_check.py $(if $(PARTS),--only $(PARTS)) $(if $(SMALL),--small)

# A folder that installs lightscale on a machine without a network, which has this Python and this torch already.
bundle: install
	$(BIN)/python tools/bundle.py --python-version $(PYTHON_VERSION) --torch $(TORCH) $(if $(OUT),--out $(OUT))

# The CUDA path without a GPU (tools/cuda_twin): brings the CUDA build of PyTorch first, 527 MB, into LIGHTSCALE_TWIN or
# .twin; `.ci/run` runs a part of it where that is there.
twin: install
	$(BIN)/python tools/twin.py fetch
	$(PYTEST) -m 'twin or not twin' tests/twin

# Write down anew what a step may ask of its device, after a change that is meant to change it.
twin-budgets: install
	$(BIN)/python tools/twin.py fetch
	$(BIN)/python tools/twin.py budgets --write
	$(BIN)/python tools/twin.py memory --write

# The documentation site. A warning, such as a broken link, is an error; what is generated is made anew each time.
docs: install
	$(BIN)/python -m sphinx -b html --nitpicky --fail-on-warning --keep-going --fresh-env --quiet \
	  --doctree-dir build/doctrees docs build/docs
	@echo "open build/docs/index.html"

# Corpus, training, resume and a sample of text, from nothing.
quickstart: install
	$(BIN)/python tools/quickstart.py

# Write the resolved form of every shipped run again, after a change that is meant to change them.
golden: install
	for config in configs/*.toml; do \
	  $(BIN)/lightscale config $$config > tests/config/golden/$$(basename $$config) || exit 1; \
	done

# Write down the versions that are installed now, after a change of dependencies.
lock: install
	$(BIN)/python tools/dependencies.py --lock

clean:
	rm -rf $(VENV) $(EVAL_VENV) $(TRL_VENV) $(AUDIT_VENV) $(FUZZ_VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find lightscale tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
