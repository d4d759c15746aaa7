# Two commands: `make train` and `make test`. Both install into .venv first, from setup.cfg and constraints.txt alone.
# `make test` leaves out what takes long. `make test-slow` runs programs that train, benchmarks, hostile input and kernels
# in simulators, `make test-distributed` whole models on meshes and in several processes.
# `make test-aot` compiles the kernels for absent TPUs and GPUs, with their own compilers, in an environment of its own.
# `make test-newest` runs a part of the tests, and those of optional packages, with the newest Python and packages.
# `make docs` builds the documentation site into site/, in an environment of its own too.

PYTHON ?= python3
# The newest Python that is here; constraints-newest.txt is of 3.13.
NEWEST ?= $(lastword $(shell command -v python3.13) $(wildcard $(HOME)/.pyenv/versions/3.13.*/bin/python3.13))
RUN ?= runs/quickstart
BIN = .venv/bin

export JAX_PLATFORMS ?= cpu
export TF_CPP_MIN_LOG_LEVEL ?= 2
# Big buffers on huge pages: XLA takes fresh ones every step, and their first touch is dear page by page.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

.PHONY: train test test-slow test-distributed test-aot test-newest test-wheel docs lint clean

train: .venv/installed
	$(BIN)/python -m launch.train --gin_file=quickstart.gin --run_dir=$(RUN)
	$(BIN)/python -m launch.evaluate --checkpoint=$(RUN)
	$(BIN)/python -m launch.generate --checkpoint=$(RUN) --prompt='def '
	$(BIN)/python -m launch.draw --run_dir=$(RUN)

test: .venv/installed lint
	$(BIN)/python -m pytest -n 2 --dist=worksteal -m 'not distributed and not slow'

test-slow: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist=worksteal -m slow

test-distributed: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist=worksteal -m distributed

test-aot: .venv-aot/installed
	.venv-aot/bin/python -m pytest -n 2 --dist=worksteal tests/*/test_aot*.py

# What JAX and the other libraries change most often: training, data, sampling, export, programs. Here alone every
# annotated function checks the shapes and types that it is given, so all mixers and the router are in it too.
test-newest: .venv-newest/installed
	CHECK_SHAPES=1 .venv-newest/bin/python -m pytest -n 2 --dist=worksteal -m 'not distributed' tests/data tests/training/test_checkpoints.py \
	  tests/training/test_loop.py tests/training/test_exchange.py tests/training/test_trackers.py tests/generation/test_stablehlo.py \
	  tests/test_model.py tests/test_config.py tests/test_api.py tests/launch/test_programs.py tests/launch/test_harness.py \
	  tests/mixers/test_every_mixer.py tests/aamoe/test_router.py tests/pallas_kernels/test_choice.py

docs: .venv-docs/installed
	.venv-docs/bin/python -m mkdocs build  # strict: a broken link is an error

# From any Python, without the versions of constraints.txt: make test-wheel PYTHON=python3.13
test-wheel:
	PYTHON=$(PYTHON) .ci/wheel

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/installed: setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@start=$$(date +%s); set -x; \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' && \
	  { set +x; echo "installed into .venv in $$(($$(date +%s) - start)) s"; }
	@touch $@

.venv-newest/installed: setup.cfg pyproject.toml constraints-newest.txt
	@test -n '$(NEWEST)' || { echo 'error: there is no Python 3.13; name one: make NEWEST=/path/to/python3.13 ...' >&2; exit 1; }
	$(NEWEST) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-newest.txt -e '.[dev,harness,wandb,mlflow]'
	@touch $@

.venv-aot/installed: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-aot
	.venv-aot/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[aot,dev]'
	@touch $@

.venv-docs/installed: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

clean:
	rm -rf .venv .venv-aot .venv-docs .venv-newest site build *.egg-info pallas_kernels/build pallas_kernels/*.egg-info .pytest_cache .ruff_cache .hypothesis
