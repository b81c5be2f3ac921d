# `make serve` and `make test` work on a fresh machine: they make $(VENV) and install what they need into it first.
# Every variable below can be given on the command line, as in `make serve MODEL=nep.txt PORT=9000`.

PYTHON ?= python3
VENV ?= .venv
# More for `python -m venv`; --system-site-packages takes a torch that the machine has already (then with TORCH= empty).
VENV_FLAGS ?=
# The torch that is tested. The package itself sets no upper bound.
TORCH ?= torch==2.13.*
# More for `pip install` of torch alone, such as the --index-url of a CUDA or ROCm build.
TORCH_FLAGS ?=
# More for every `pip install`.
PIP_FLAGS ?=

# Of `make serve`: models as [name=]PATH, several with blanks between; other flags of `nepserve serve` in ARGS.
MODEL ?=
ARGS ?=
# Of `make test`: what else pytest is told, such as TESTS="tests/nepcore -k zbl".
TESTS ?=
WORKERS ?= 2
# What is installed for tests and checks; with `bridges` also the programs that nepserve is a force engine of.
TEST_EXTRAS ?= test,docs
# Of `make bench`: scripts of bench/, by name; ARGS go to each.
BENCH ?= cpu http load

RUN := $(VENV)/bin
PIP = $(RUN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS)
CODE := model service tests bench examples docker
SERVE_READY := $(VENV)/.ready-to-serve
TEST_READY := $(VENV)/.ready-to-test
BENCH_READY := $(VENV)/.ready-to-bench

# Some shells export HOST as the name of the machine; only what was said to make counts.
given = $(if $(filter command line,$(origin $(1))),$(2) $($(1)))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help serve test test-full lint format bench docs wheel lock images clean

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

serve: $(SERVE_READY) ## Serve MODEL=nep.txt (a demonstration without it); HOST=, PORT=, ARGS="--dtype float64".
	@exec $(RUN)/nepserve serve $(MODEL) $(call given,HOST,--host) $(call given,PORT,--port) $(ARGS)

test: $(TEST_READY) ## Run the tests, those aside that take longer than a minute; TESTS="tests/nepcore -k zbl".
	$(RUN)/python -m pytest -m "not slow" -n $(WORKERS) $(TESTS)

test-full: $(TEST_READY) ## Run all tests.
	$(RUN)/python -m pytest -n $(WORKERS) $(TESTS)

lint: $(TEST_READY) ## Check style and types.
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

format: $(TEST_READY) ## Put code and generated tables into the project's format.
	$(RUN)/ruff check --fix-only --quiet .
	$(RUN)/ruff format .
	$(RUN)/python docs/settings_table.py --write

bench: $(BENCH_READY) ## Measure; one script: BENCH=http ARGS="--calls 100".
	@for script in $(BENCH); do echo "== bench/$$script.py"; $(RUN)/python bench/$$script.py $(ARGS) || exit; done

docs: $(TEST_READY) ## Build the documentation into site/.
	$(RUN)/mkdocs build --strict --quiet

wheel: $(TEST_READY) ## Build the package into dist/.
	rm -rf dist
	$(RUN)/python -m pip wheel --disable-pip-version-check $(PIP_FLAGS) --quiet --no-deps --wheel-dir dist .

lock: $(TEST_READY) ## Pin what goes into the images to what is installed here.
	$(RUN)/python docker/lock.py > docker/constraints.txt.new
	mv docker/constraints.txt.new docker/constraints.txt

images: ## Build both images without a registry and try them; needs root, buildah, debootstrap. ARGS="cuda --keep".
	$(PYTHON) deploy/check-images $(ARGS)

clean: ## Remove the virtual environment, caches and everything that was built.
	rm -rf $(VENV) site dist build .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find $(wildcard $(CODE)) -name __pycache__ -type d -prune -exec rm -rf {} +

$(SERVE_READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "nepserve needs Python 3.10 or newer; name one with PYTHON=, as in: make serve PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments: install python3-venv (Debian, Ubuntu), or name another Python with PYTHON=" >&2; exit 1; }
	@$(RUN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV_FLAGS) $(VENV)
	@# Editable installs from pyproject.toml are newer than the pip of the oldest Pythons.
	$(PIP) --quiet 'pip>=22'
	$(if $(TORCH),$(PIP) $(TORCH_FLAGS) '$(TORCH)')
	$(PIP) --editable '.[server,md]'
	@touch $@

$(TEST_READY): $(SERVE_READY)
	$(PIP) --editable '.[$(TEST_EXTRAS)]'
	@touch $@

$(BENCH_READY): $(SERVE_READY) $(wildcard bench/requirements.txt)
	$(if $(wildcard bench/requirements.txt),$(PIP) -r bench/requirements.txt)
	@touch $@
