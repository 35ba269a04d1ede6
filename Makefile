# make demo, make test: each does all its own set-up.
PYTHON ?= python3
PIP := .venv/bin/python -m pip --disable-pip-version-check
RUN := .venv/bin/

.PHONY: setup demo test test-all fuzz check docs figures wheel wheel-test clean
.DELETE_ON_ERROR:

setup: .venv/ready

# Made again when what it installs changes.
.venv/ready: pyproject.toml setup.py constraints.txt Makefile $(wildcard src/sparsevd/kernels/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "sparsevd needs Python 3.11 or newer; name one with: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	$(PIP) install --quiet --constraint constraints.txt "torch==2.13.0"
	$(PIP) install --quiet --constraint constraints.txt --editable ".[figures,package,test]"
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

# What only the site needs: it would make every set-up longer.
.venv/ready-for-docs: .venv/ready
	$(PIP) install --quiet --constraint constraints.txt --editable ".[docs]"
	@touch $@

# The site, in build/site/index.html. A warning, such as a link that leads nowhere, is an error.
docs: .venv/ready-for-docs
	$(RUN)python -m sphinx --fail-on-warning --keep-going --quiet --conf-dir docs --doctree-dir build/doctrees . build/site
	@echo "the site: build/site/index.html"

# A test file per process at a time, each with one thread: twice as fast on two cores.
test: check
	OMP_NUM_THREADS=1 $(RUN)pytest --numprocesses auto --dist loadfile

# The whole product, with a tenth of the trials and every name of the C export: at most half an hour.
test-all: test docs
	SPARSEVD_LONG=1 OMP_NUM_THREADS=1 $(RUN)pytest tests/test_c_export.py
	SPARSEVD_LONG=1 OMP_NUM_THREADS=1 $(RUN)pytest tests/test_documents.py -k tutorials
	sh tests/set_up_browser.sh
	SPARSEVD_LONG=1 OMP_NUM_THREADS=1 $(RUN)pytest -m long -rs --numprocesses auto --dist loadfile
	cd tests && ../$(RUN)python -m fuzz --part 0.1
	$(MAKE) wheel-test

# Hostile files, wrong shapes, kills and full disks in full numbers: about an hour.
fuzz: setup
	cd tests && ../$(RUN)python -m fuzz --record ../benchmarks/results/fuzz.json

# One wheel for this platform and every Python, in dist; auditwheel names the oldest Linux that it runs on.
wheel: setup
	rm -rf build dist
	$(RUN)python -m build --outdir build/dist .
	mkdir dist && cp build/dist/*.tar.gz dist
	@case "$$(echo build/dist/*.whl)" in \
	  *-linux_*) PATH="$(CURDIR)/.venv/bin:$$PATH" auditwheel repair --strip --wheel-dir dist build/dist/*.whl ;; \
	  *) cp build/dist/*.whl dist ;; \
	esac
	@echo "written:" dist/*

# The wheel in an empty environment without a compiler: doctor, a network of one's own, the demo.
wheel-test: wheel
	$(RUN)python tests/wheel_in_an_empty_environment.py dist/*.whl

clean:
	rm -rf .venv runs build dist src/*.egg-info src/sparsevd/kernels/*.so .pytest_cache .mypy_cache .ruff_cache
