# Everything CI runs, under the names a person would type.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo

.PHONY: collected demo docs recipe-metric-learning recipe-token-classification recipe-emulator recipe-vision-language recipe-decomposition browser test test-all test-fast fuzz coverage test-oldest test-newest cluster chaos chaos-sweep launches sameness lint setup clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP) $(DEMO_STAMP)

setup: $(STAMP)

# The package alone, in a minute or two; `.[dev]` has far more.
$(DEMO_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $(DEMO_STAMP)

# One training on 1, 2 and 4 ranks, killed and resumed, beside plain DDP: build/demo/demo.html.
demo: $(DEMO_STAMP)
	$(BIN)/samestep demo build/demo --force

# Data, both stages on two ranks, averages, predictions, pages: build/metric_learning/results.html, in minutes.
recipe-metric-learning: $(STAMP)
	$(BIN)/python recipes/metric_learning/run.py build/metric_learning --force --nproc 2

# Documents, a training on two ranks, a short search, the final training, ONNX and int8: build/token_classification/results.html.
recipe-token-classification: $(STAMP)
	$(BIN)/python recipes/token_classification/run.py build/token_classification --force --nproc 2

# Fields as NetCDF, two trainings on two ranks, verify, TorchScript and C++: build/emulator/results.html.
recipe-emulator: $(STAMP)
	$(BIN)/python recipes/emulator/run.py build/emulator --force --nproc 2

# Pictures, trainings in fp16 and bf16 on 1, 2 and 4 ranks, an overflow, a resume, captions: build/vision_language/results.html.
recipe-vision-language: $(STAMP)
	$(BIN)/python recipes/vision_language/run.py build/vision_language --force

# Four small models and their decompositions, one of them on 1, 2 and 4 ranks to its end; verify: build/decomposition/results.html.
recipe-decomposition: $(STAMP)
	$(BIN)/python recipes/decomposition/run.py build/decomposition --force --nproc 2

# Most of a test's time it waits for other processes: four at once keep two cores busy. One test is handed out at a
# time: with more, a worker hoards hundreds, and runs the last of them alone.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 4 --dist load --maxschedchunk 1

# Every promise, but not every variation of it: about ten minutes on two cores.
test: $(STAMP)
	$(MAKE) -j 2 lint collected
	$(PYTEST) -m 'not variation'

# With the variations (tests/variations.py): twice as long.
test-all: $(STAMP)
	$(MAKE) -j 2 lint collected
	$(PYTEST)

# Every worker collects all tests. What this compiles, on the CPU that the type check leaves idle, they only read.
collected: $(STAMP)
	-@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --collect-only --quiet --quiet > /dev/null

# For the inner loop: what needs no other process but its own.
test-fast: $(STAMP) lint
	$(BIN)/python -m pytest -n 2 tests/unit tests/test_architecture.py

# Fifty times as many odd configs, run directories and command lines as the suite tries, new ones each time.
fuzz: $(STAMP)
	FUZZ_TIMES=50 $(BIN)/python -m pytest -n 2 -m hypothesis tests/fuzz tests/unit

# Lines of src that tests run, in ranks and commands too. The cluster's tests are not among them.
coverage: $(STAMP)
	rm -rf build/coverage
	$(BIN)/python -m coverage run -m pytest -n 3 tests/unit tests/fuzz tests/distributed tests/export tests/cli
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report --skip-covered

# The oldest and newest supported Python and packages: by hand, several gigabytes each.
# INTERPRETER=/path/to/python3.10 where the right one is not on the PATH.
test-oldest test-newest: test-%: $(STAMP)
	$(BIN)/python scripts/supported_versions.py $* $(if $(INTERPRETER),--python $(INTERPRETER))

cluster:
	tests/cluster/install.sh

browser:
	tests/browser/install.sh

chaos: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.chaos --kills 300

# 12 trials of 3 folds with one and two ranks, and killed at three instants. SWEEP='sweep.yaml trials=6' for another one.
chaos-sweep: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.sweep $(SWEEP)

launches: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.launches --in-a-row 50 --at-once 4

# Every kind of model, at every size, in every way to run it, to the bit: a quarter of an hour.
# DEVICE=cuda: ranks that share a GPU, with bf16, fp16 and CUDA graphs besides.
DEVICE := cpu
sameness: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.sameness.matrix --device $(DEVICE) \
		--write docs/sameness$(if $(filter cuda,$(DEVICE)),-gpu).md --json build/sameness-$(DEVICE).json

# The guide as a site: build/site/index.html.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src

clean:
	rm -rf $(VENV) build runs
