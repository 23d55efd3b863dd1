# Two targets do everything on a fresh machine: `make demo` and `make test`.
# Needed beforehand: Python 3.11 or newer and make.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test check clean
.DELETE_ON_ERROR:

# The environments are made again whenever what they install has changed.
$(VENV)/.run: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/pip install --quiet --disable-pip-version-check "pip>=25.1"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --group dev
	touch $@

demo: $(VENV)/.run
	$(BIN)/musespark demo

check: $(VENV)/.dev
	PATH="$(abspath $(BIN)):$$PATH" scripts/check

test: check
	PATH="$(abspath $(BIN)):$$PATH" scripts/test

clean:
	rm -rf $(VENV)
