# make lab     set up once, then open JupyterLab on the start page of my_labs/, your copy   (make lab ARGS=--no-browser on a server)
# make check   set up once, then in four minutes what a change should pass: style, imports, unit tests, three labs
# make test    set up once, then everything that CI runs   (one of four machines: ARGS="--splits 4 --group 1")
# make labs    write the notebooks from tools/source and run them    (NAMES=01_image_stacking for one)
# make report  run all labs and write the claims report, build/report.html
# make book    the course as a site, from the committed notebooks: build/book    (ARGS=--serve to look at it)
# make looks   photograph every lab in JupyterLab, light and dark, into build/looks   (NAMES=01_image_stacking for one)
# make bench   what measuring costs
# make zoo     how good predictions are: models measured and predicted, data/recorded/zoo.csv; hours   (ARGS=--tell for its figures)
# make releases  the verdicts under other releases of TensorFlow, data/recorded/releases.json; hours   (ARGS="--releases 2.15 --labs 08_loop_accumulation")
# make rehearsal  a class of simulated learners on this machine: time, memory, data/recorded/classroom.csv   (ARGS="--learners 1 8")
# make chaos   arms that misbehave in every way, two at a time; nothing may be left (ARGS="--arms 1000")
# make newest  with the newest versions in place of the pinned ones, in an environment of their own: which verdicts changed, then the tests

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Started as root, as in many containers, Jupyter wants to be told that this is meant.
ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)
# JupyterLab's own question about news shall not stand over a lab.
QUIET = mkdir -p $(1)/share/jupyter/lab/settings && cp tools/overrides.json $(1)/share/jupyter/lab/settings/
# What `make check` leaves to `make test`: tests that run notebooks, browsers, hubs or whole scripts, and all labs but three.
SLOW := book browser capstone cases checks classroom do_no_harm doctor doctor_cli doctor_notebook doctor_page labs looks magic notebook_runs peak trying wheel
FEW := 01_image_stacking 19_reading_an_oom 21_the_profiler

# Modules are compiled once, and not in each of hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: lab check test in_step labs report book looks bench zoo releases rehearsal chaos newest

lab: $(READY)
	$(BIN)/python tools/working_copy.py my_labs
	$(BIN)/jupyter lab $(ROOT) --ServerApp.root_dir=my_labs --LabApp.default_url=/lab/tree/start_here.ipynb $(ARGS)

check: in_step
	$(BIN)/python -m pytest -n auto $(SLOW:%=--ignore=tests/test_%.py) tests $(FEW:%=labs/%.ipynb) $(ARGS)

test: in_step
	$(BIN)/python -m pytest -n auto $(ARGS)

# What is written by one rule, and what is made from something else.
in_step: $(READY)
	$(BIN)/ruff check -q
	$(BIN)/ruff format -q --check
	$(BIN)/python tools/build.py --check
	$(BIN)/python tools/report.py --check
	$(BIN)/python tools/map.py --check

labs: $(READY)
	$(BIN)/python tools/build.py --execute $(NAMES)
	$(BIN)/python tools/report.py --readme

report: $(READY)
	$(BIN)/python tools/report.py $(ARGS)

book: $(READY)
	$(BIN)/python tools/book.py $(ARGS)

looks: $(READY)
	PYTHONPATH=tests $(BIN)/python tools/looks.py $(NAMES)

bench: $(READY)
	$(BIN)/python tools/bench.py

zoo: $(READY)
	$(BIN)/python tools/zoo.py $(ARGS)

releases: $(READY)
	$(BIN)/python tools/releases.py $(ARGS)

rehearsal: $(READY)
	$(BIN)/python tools/rehearsal.py $(ARGS)

chaos: $(READY)
	$(BIN)/python tools/chaos.py $(ARGS)

newest: $(READY)
	$(PYTHON) -m venv build/newest
	sed 's/==[^ ]*//; s/#.*//' requirements.txt > build/newest.txt
	build/newest/bin/pip install --upgrade -r build/newest.txt -e .
	$(call QUIET,build/newest)
	$(BIN)/python tools/releases.py --against-record build/newest/bin/python
	build/newest/bin/python -m pytest -n auto $(ARGS)

$(READY): requirements.txt pyproject.toml tools/overrides.json
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; this is " + sys.version.split()[0] + ". Try: make $(MAKECMDGOALS) PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@echo "Installing TensorFlow and JupyterLab: about 1 GB, a few minutes, only this once …"
	$(BIN)/pip install --progress-bar on -q -r requirements.txt -e .
	$(call QUIET,$(VENV))
	touch $@
