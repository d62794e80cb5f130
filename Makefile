# Every target first makes .venv with $(PYTHON), and installs what the course needs into it, once. It is done again when
# requirements.txt or pyproject.toml has changed, and when this folder has moved. With ENV=none $(PYTHON) is used as it
# is, such as that of an active environment, and nothing is installed.

PYTHON ?= python3
ARGS ?=
# Files of tests that run at a time: one more than two cores, because some tests wait for processes.
JOBS ?= 3

# A path may contain a space or a quote: `value` reads it as it is, and $(call quote,...) hands it to the shell.
quote = '$(subst ','\'',$(1))'
INTERPRETER := $(call quote,$(value PYTHON))

# STEPS_ENV tells tests/test_environment.py whether the installed versions have to be the pins.
ifeq ($(ENV),none)
  export STEPS_ENV := none
  PY := $(INTERPRETER)
  ENDING := $(PYTHON) was used as it is: nothing was installed.
else
  export STEPS_ENV := venv
  PY := .venv/bin/python
  ENDING := To work in this environment yourself: source .venv/bin/activate
endif
# tests/conftest.py puts the files that take longest first, and they stay in this order.
PYTEST = $(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
# pip is told to compile nothing, which halves its time; then what gets imported must be compiled once and kept.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile

# $(call need_...,PYTHON) stops with one line that says what to install.
need_python = $(if $(shell $(1) -c 'import sys; (3, 11) <= sys.version_info[:2] <= (3, 13) and print(1)' 2>/dev/null),,\
  $(error $(or $(shell $(1) --version 2>/dev/null),No $(1)): the course needs Python 3.11, 3.12 or 3.13. \
  Install the packages python3.12 and python3.12-venv, say, then: make PYTHON=python3.12))
need_venv = $(if $(shell $(1) -c 'import ensurepip, venv; print(1)' 2>/dev/null),,\
  $(error $(1) cannot make virtual environments. Install the package $(notdir $(PYTHON))-venv))

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lab notebooks slides site newest lint report gpu-check clean setup install force

help: ## this list
	@echo 'make TARGET [ARGS="..."] [PYTHON=python3.12] [ENV=none]'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' Makefile

# $(call run,COMMAND): ends by naming the environment, also when the command fails or is stopped with Ctrl-C.
run = @trap : INT; $(1); status=$$?; echo; echo $(call quote,$(ENDING)); exit $$status

demo: setup ## every stage on real input, compared with the float64 reference
	$(call run,$(PY) -m steps demo $(ARGS))

test: setup ## the tests, three files at a time (JOBS=3); ARGS="tests/test_step03_triton.py -k causal" picks
	$(call run,$(PYTEST) $(ARGS))

test-all: setup ## the tests, and those that take too long for `make test`, such as random inputs
	$(if $(filter none,$(ENV)),,@$(PIP_INSTALL) 'transformers==5.23.*' 'diffusers==0.42.*')
	$(call run,$(PYTEST) --long $(ARGS))

# The root is this folder, so that the links of a copy in my/ lead to steps/, papers/ and reference/.
lab: setup ## JupyterLab on your own copies of the notebooks, in my/
	@mkdir -p my
	@for notebook in notebooks/*.ipynb; do \
	  [ -e "my/$${notebook##*/}" ] || cp "$$notebook" my/; \
	done
	$(call run,$(NO_NEWS) $(PY) -m jupyterlab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/my $(QUIET) $(ARGS))

# Jupyter says where it can be opened, and what fails.
QUIET := --log-level=ERROR --LabApp.log_level=ERROR
# It does not ask on the first screen whether to fetch Jupyter's news: the default in notebooks/lab/labconfig is no. Who
# has chosen otherwise in JupyterLab's own settings keeps that.
NO_NEWS := JUPYTER_CONFIG_PATH="notebooks/lab$${JUPYTER_CONFIG_PATH:+:$$JUPYTER_CONFIG_PATH}"

NOTEBOOKS := $(patsubst notebooks/src/%.py,notebooks/%.ipynb,$(wildcard notebooks/src/*.py))
notebooks: $(NOTEBOOKS) ## execute notebooks/src/*.py; one alone: make notebooks/04a_ring.ipynb
	$(call run,true)

# Always executed: what a notebook shows depends on the stages, too. --update, no timing, and what a cell prints as one
# output: equal outputs, equal file. The latter takes a call of its own, as nbconvert does it before it executes.
NBCONVERT := -m nbconvert --log-level WARN --to notebook --inplace
notebooks/%.ipynb: notebooks/src/%.py force | setup
	$(PY) -m jupytext --quiet --update --to ipynb --output $@ $<
	$(PY) $(NBCONVERT) --execute --ExecutePreprocessor.record_timing=False $@
	$(PY) $(NBCONVERT) --coalesce-streams $@

# What the slides load, out of the packages that notebooks/slides/package.json pins, and where they look for it.
SLIDES_ASSETS := reveal.js/dist/reveal.css reveal.js/dist/reveal.js mathjax/es5/tex-svg.js mathjax/LICENSE
SLIDES_OPTIONS := --template slides --TemplateExporter.extra_template_basedirs=notebooks --no-prompt \
  --SlidesExporter.reveal_url_prefix=assets/reveal.js --SlidesExporter.reveal_theme=course \
  --HTMLExporter.mathjax_url=assets/mathjax/es5/tex-svg.js --HTMLExporter.embed_images=True
need_npm = $(if $(shell command -v npm 2>/dev/null),,\
  $(error No npm, which fetches reveal.js and MathJax for the slides, once. Install the package npm, then: make slides))

slides: slides/assets setup ## lecture slides of every notebook, in slides/index.html; they need no network
	@mkdir -p slides/assets/reveal.js/dist/theme
	@cp notebooks/slides/course.css slides/assets/reveal.js/dist/theme/
	$(call run,$(PY) -m nbconvert --log-level WARN --to slides $(SLIDES_OPTIONS) --output-dir slides notebooks/*.ipynb)
	@$(PY) notebooks/slides/contents.py slides

slides/assets: notebooks/slides/package.json
	$(need_npm)
	rm -rf slides/npm $@
	mkdir -p slides/npm
	cp $< slides/npm
	cd slides/npm && npm install --loglevel error --no-audit --no-fund --no-package-lock --ignore-scripts
	cd slides/npm/node_modules && tar -cf ../assets.tar $(SLIDES_ASSETS)
	mkdir $@
	tar -xf slides/npm/assets.tar -C $@
	rm -rf slides/npm

site: build/site-env/done ## the course as a site, in build/site/README.html; it needs no network then
	build/site-env/bin/python -m sphinx -b html -q -W --keep-going -d build/site-cache -c notebooks/site . build/site
	@cp build/site/README.html build/site/index.html
	@echo 'Open build/site/index.html.'

# Packages of its own, because the course needs none of them.
build/site-env/done: notebooks/site/requirements.txt
	$(call need_venv,$(PYTHON))
	rm -rf build/site-env
	$(PYTHON) -m venv build/site-env
	build/site-env/bin/python -m pip install --quiet -r $<
	touch $@

newest: ## the tests with the newest packages that pyproject.toml admits, in build/newest; ARGS picks, as in `make test`
	$(call need_venv,$(PYTHON))
	[ -e build/newest ] || $(PYTHON) -m venv build/newest
	sed 's/==[0-9][0-9.]*//' requirements.txt | \
	  build/newest/bin/python -m pip install --quiet --upgrade --editable '.[cu13]' --requirement /dev/stdin
	build/newest/bin/python -m pip freeze | sed -n '/^\(torch\|triton\|numba\|numba-cuda\|numpy\|cuda-core\|cuda-python\)==/p'
	STEPS_ENV=none build/newest/bin/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

lint: setup ## ruff
	$(call run,$(PY) -m ruff check $(ARGS))

report: setup ## the pages' tables, figures and solutions, from the measured rows and the stages
	$(call run,$(PY) -m steps.course.bench.report && $(PY) -m steps.course.figures.plots && $(PY) -m steps.course.demo.readme --tables && PYTHONPATH=. $(PY) notebooks/site/record.py && $(PY) -m steps.course.demo.training --draw && $(PY) -m steps.course.workbook.solutions)

gpu-check: setup ## the tests and the sanitizers on this GPU, with a summary; JOBS=3 at a time
	$(call run,PYTHONPATH=tests $(PY) -m tests.test_gpu_check $(JOBS) $(ARGS))

clean: ## remove .venv, the slides and the caches; my/ stays
	rm -rf .venv build slides *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# The stamp says which folder was set up: a folder that has moved is installed again.
STAMP := .venv/.flash-attention-course
UP_TO_DATE = $(shell [ "$$(cat $(STAMP) 2>/dev/null)" = $(call quote,$(CURDIR)) ] && \
  [ $(STAMP) -nt requirements.txt ] && [ $(STAMP) -nt pyproject.toml ] && echo yes)

setup: $(if $(filter none,$(ENV)),,$(if $(UP_TO_DATE),,install))
	@command -v g++ >/dev/null || echo 'g++ not found: without a GPU stage 02 is skipped. Install the package g++ to run it.'

# The pinned torch has brought setuptools, so it is not fetched again; its advice about editable packages is hidden.
install:
	$(call need_python,$(INTERPRETER))
	$(call need_venv,$(INTERPRETER))
	$(INTERPRETER) -m venv .venv
	$(info Installing the packages of requirements.txt into .venv. This takes some minutes, and pip is quiet.)
	@$(PIP_INSTALL) --upgrade pip
	@$(PIP_INSTALL) -r requirements.txt
	@PYTHONWARNINGS=ignore $(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@echo $(call quote,$(CURDIR)) > $(STAMP)
