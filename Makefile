# make demo, make test: each does all its own set-up.
PYTHON ?= python3
PIP := .venv/bin/python -m pip --disable-pip-version-check
RUN := .venv/bin/

.PHONY: setup demo test test-all fuzz check figures clean
.DELETE_ON_ERROR:

setup: .venv/ready

# Made again when what it installs changes.
.venv/ready: pyproject.toml setup.py constraints.txt Makefile $(wildcard src/sparsevd/kernels/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "sparsevd needs Python 3.11 or newer; name one with: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	$(PIP) install --quiet --constraint constraints.txt "torch==2.13.0"
	$(PIP) install --quiet --constraint constraints.txt --editable ".[figures,test]"
	@touch $@

demo: setup
	$(RUN)sparsevd train --model lenet-300-100 --data mnist --out runs/demo --resume
	$(RUN)sparsevd report runs/demo

# The README's figure, from the run of the demo.
figures: setup
	$(RUN)python docs/make_figure.py runs/demo

check: setup
	$(RUN)ruff check .
	$(RUN)ruff format --check .
	$(RUN)mypy

# A test file per process at a time, each with one thread: twice as fast on two cores.
test: check
	OMP_NUM_THREADS=1 $(RUN)pytest --numprocesses auto --dist loadfile

# The whole product, with a tenth of the trials and every name of the C export: at most half an hour.
test-all: test
	SPARSEVD_LONG=1 OMP_NUM_THREADS=1 $(RUN)pytest tests/test_c_export.py
	SPARSEVD_LONG=1 OMP_NUM_THREADS=1 $(RUN)pytest tests/test_cli.py -k killed_runs
	sh tests/set_up_browser.sh
	SPARSEVD_LONG=1 OMP_NUM_THREADS=1 $(RUN)pytest tests/test_report_in_browser.py -rs
	cd tests && ../$(RUN)python -m fuzz --part 0.1

# Hostile files, wrong shapes, kills and full disks in full numbers: about an hour.
fuzz: setup
	cd tests && ../$(RUN)python -m fuzz --record ../benchmarks/results/fuzz.json

clean:
	rm -rf .venv runs build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
