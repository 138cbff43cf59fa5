# Every target sets itself up: it creates .venv and installs what constraints.txt pins, once.
# Which index serves the packages is pip's own business: PIP_INDEX_URL, PIP_EXTRA_INDEX_URL and
# pip.conf are honoured as they are.

PYTHON ?= python3
JOBS   ?= 2
PKG    ?=

BIN   := .venv/bin
STAMP := .venv/installed

# Many small matrix products: threads of a BLAS would only fight with the test workers.
export OPENBLAS_NUM_THREADS = 1
export OMP_NUM_THREADS = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Installed without bytecode, which takes half of the time: the first import of a module writes it.
unexport PYTHONDONTWRITEBYTECODE

# loadgroup: conftest.py gives each test file a group, so tests that share a compiled kernel share a worker.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --durations=10
QUICK  := -m "not matrix and not sweep and not hw and not engines"

.DEFAULT_GOAL := help
.PHONY: help demo test quick matrix sweep engines tiers lint bringup docs wheel smoke clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' Makefile

demo: $(STAMP)  ## run the attention kernel here, on a GPU or in the emulator, and print how exact it is
	$(BIN)/python scripts/run.py fmha

test: lint  ## ruff, mypy, the house rules and every quick test
	$(PYTEST) $(QUICK)

quick: $(STAMP)  ## the quick tests of one package with PKG=fmha
	$(PYTEST) $(QUICK) tests/$(PKG)

matrix: $(STAMP)  ## the case matrix, of one package with PKG=fmha
	$(PYTEST) -m "matrix and not hw" tests/$(PKG)

sweep: $(STAMP)  ## every config of every kernel, of one package with PKG=fmha; takes hours
	$(PYTEST) -m "sweep and not hw" tests/$(PKG)

engines: $(STAMP)  ## real vLLM and SGLang serve on our kernels, in an environment of their own
	$(BIN)/python scripts/engines.py build
	$(PYTEST) -m engines tests/engines

tiers: $(STAMP)  ## tests of each package and tier, and which pairs of values they cover
	PYTHONPATH=scripts $(BIN)/python -m tests.support.pairs

lint: $(STAMP)  ## ruff, and mypy where pyproject.toml asks for it
	$(BIN)/ruff check .
	$(BIN)/mypy

bringup: $(STAMP)  ## everything there is to find out on this GPU, as one file: docs/bringup.md
	$(BIN)/python scripts/bringup.py

docs: .venv/docs  ## all pages and an API reference as a site with search, in out/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	$(BIN)/python scripts/house.py links

wheel: $(STAMP)  ## wheels and sdists of ptxemu and of all other packages, into out/dist
	rm -rf out/dist
	$(BIN)/python -m build --quiet --no-isolation --outdir out/dist ./ptxemu
	$(BIN)/python -m build --quiet --no-isolation --outdir out/dist .

smoke: wheel  ## these wheels in an empty environment: their files, entry points, the pages' examples
	$(BIN)/python scripts/smoke.py out/dist/*.whl

clean:  ## remove the environment, the caches and out/
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build out *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable ./ptxemu --editable '.[docs]'
	@touch $@

$(STAMP): pyproject.toml ptxemu/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo "$(PYTHON) is older than 3.10; name another: make PYTHON=python3.12 ..."; exit 1; }
	@echo "Installing into .venv; this happens once and takes a minute or more."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable ./ptxemu --editable '.[dev]'
	@touch $@
