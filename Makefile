# make quickstart | test | check | coverage | ecosystem | lowest | newest | docs | clean. Everything lives in .venv; versions come from constraints.txt.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
LOWEST := .venv-lowest/bin
NEWEST := .venv-newest/bin
PIP := $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt
JOBS ?= 2
# The longest files have few tests: they come first (testpaths), so that no process ends long after the others.
BY_FILE := --dist loadfile --no-loadscope-reorder
# The native encoder is built where a C++ compiler and a CPU of its kind are; everything else works without it.
NATIVE := $(if $(filter x86_64 aarch64,$(shell uname -m)),$(shell command -v $(CXX)))

.PHONY: quickstart test check coverage ecosystem lowest newest docs clean schema

quickstart: $(VENV)/.quickstart $(VENV)/.native
	$(BIN)/python -m bertopt export quickstart --out out/quickstart

test: $(VENV)/.test $(VENV)/.native
	$(BIN)/python -m pytest -n $(JOBS) $(BY_FILE)
ifneq ($(NATIVE),)
	$(BIN)/python -m pytest -n $(JOBS) native/tests -m "not slow"
endif

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports

# The tests with every line of bertopt's counted, which slows torch's export and compiler: too long for CI.
coverage: $(VENV)/.test $(VENV)/.native
	rm -f .coverage .coverage.*
	$(BIN)/python -m pytest -n $(JOBS) $(BY_FILE) --cov --cov-report=
	$(BIN)/python -m coverage report --skip-covered --fail-under=85

# Delivered artefacts in sentence-transformers and optimum, whose environments it builds once in .peers (a few GB).
ecosystem: $(VENV)/.test
	$(BIN)/python -m pytest tests/ecosystem

# The tests on the lowest versions that pyproject.toml allows (torch's is that of constraints.txt), in another environment.
lowest: $(VENV)/.test
	test -x $(LOWEST)/python || $(PYTHON) -m venv .venv-lowest
	$(BIN)/python -m campaigns.lowest_versions > .venv-lowest/constraints.txt
	$(LOWEST)/pip install -q -c constraints.txt torch
	$(LOWEST)/pip install -q -c .venv-lowest/constraints.txt -e '.[cpu,demo,serve,sign,metrics,traces]' ./native pytest pytest-xdist hypothesis httpx openai
	$(LOWEST)/python -m pytest -n $(JOBS) $(BY_FILE)

# The tests on the newest versions that pip finds, which is what users install; torch's is that of constraints.txt unless TORCH says another:
# `make newest TORCH=2.14.1`. Newer ones bring CUDA's libraries, 5 GB, and run on a CPU too.
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)
newest:
	test -x $(NEWEST)/python || $(PYTHON) -m venv .venv-newest
	echo 'torch==$(TORCH)' > .venv-newest/constraints.txt
	$(NEWEST)/pip install -q -c .venv-newest/constraints.txt torch
	$(NEWEST)/pip install -q --upgrade --upgrade-strategy eager -c .venv-newest/constraints.txt -e '.[cpu,rtx,demo,test]' ./native
	$(NEWEST)/python -m pytest -n $(JOBS) $(BY_FILE)

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -q -W --keep-going docs out/docs

schema: $(VENV)/.quickstart
	$(BIN)/python -m bertopt.recipe.schema

clean:
	rm -rf $(VENV) .venv-lowest .venv-newest out build native/build .mypy_cache .pytest_cache .ruff_cache .coverage .coverage.* bertopt.egg-info

# torch first and pinned: any range would let the resolver pick a newer build with gigabytes of CUDA.
$(VENV)/.torch: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	touch $@

$(VENV)/.quickstart: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[cpu,demo]'
	touch $@

# Where the compiler cannot build it, `make test` fails; the quickstart goes on.
$(VENV)/.native: $(VENV)/.torch $(wildcard native/CMakeLists.txt native/pyproject.toml native/bertopt_native/*.py native/src/* native/src/kernel/*)
ifneq ($(NATIVE),)
	-PIP_CONSTRAINT=constraints.txt $(PIP) ./native
else
	@echo "no native encoder: it needs an x86-64 or 64-bit ARM CPU and a C++ compiler (apt-get install g++, then run make again)."
	@echo "Lost: the pass build_native, the fastest form on x86-64 CPUs. Recipes use OpenVINO instead."
endif
	touch $@

$(VENV)/.docs: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[build,docs]'
	touch $@

$(VENV)/.test: $(VENV)/.quickstart
	$(PIP) -e '.[cpu,rtx,demo,test]'
	touch $@
