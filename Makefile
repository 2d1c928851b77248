# make quickstart | test | check | docs | clean. Everything lives in .venv; versions come from constraints.txt.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt
JOBS ?= 2

.PHONY: quickstart test check docs clean schema

quickstart: $(VENV)/.quickstart
	$(BIN)/python -m bertopt export quickstart --out out/quickstart

test: $(VENV)/.test
	rm -f .coverage .coverage.*
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --cov --cov-report=
	$(BIN)/python -m coverage report --skip-covered --fail-under=85

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -q -W --keep-going docs out/docs

schema: $(VENV)/.quickstart
	$(BIN)/python -m bertopt.recipe.schema

clean:
	rm -rf $(VENV) out build .mypy_cache .pytest_cache .ruff_cache .coverage .coverage.* bertopt.egg-info

# torch first and pinned: any range would let the resolver pick a newer build with gigabytes of CUDA.
$(VENV)/.torch: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	touch $@

$(VENV)/.quickstart: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[cpu,demo]'
	touch $@

$(VENV)/.docs: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[build,docs]'
	touch $@

$(VENV)/.test: $(VENV)/.quickstart
	$(PIP) -e '.[cpu,rtx,demo,test]'
	touch $@
