# One verb per job. Each makes its own .venv where there is none.
PYTHON ?= python3
BIN := .venv/bin
BASE := .venv/.base
READY := .venv/.ready
WORKERS ?= 2
SHARED := -n $(WORKERS) --dist worksteal
DOCTESTS := docs README.md src
# What computes; the others start processes, read files or draw pages.
NUMERICAL := $(filter-out $(addprefix tests/,bench cli gpu interpreted project report serve support), $(wildcard tests/*))
SETTINGS := ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=COMPATIBLE OPENBLAS_CORETYPE=Prescott \
	OMP_NUM_THREADS=1 OMP_NUM_THREADS=2

# Where the environment forbids bytecode, each of the hundreds of processes that the tests start compiles all it imports.
export PYTHONDONTWRITEBYTECODE :=

# $(1) the environment, $(2) the versions, $(3) what of the project. torchvision is built for CUDA in the index; without
# its dependencies it leaves the pinned torch alone. pip would compile 20,000 files on one core; a few of them are no
# Python that compiles. Of RARELY, Python itself compiles what is imported.
QUIETLY := --quiet --disable-pip-version-check --no-compile
RARELY := '/(tests?|pip|transformers/models|debugpy)/'
define INSTALL
test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
$(1)/bin/python -m pip install $(QUIETLY) -c $(2) torch
$(1)/bin/python -m pip install $(QUIETLY) -c $(2) -e "$(3)"
endef
define INSTALL_FOR_TESTS
$(call INSTALL,$(1),$(2),$(3))
$(1)/bin/python -m pip install $(QUIETLY) -c $(2) --no-deps timm torchvision
$(1)/bin/python -m compileall -qq -j 0 -x $(RARELY) $(1)/lib || true
endef

.PHONY: demo test gpu check lint browser bench fuzz mutants faults docs site tables portable lowest dist clean

# What the demo needs alone; the first target that tests installs the rest into the same environment.
demo: $(BASE)
	$(BIN)/nearfar demo --overwrite

# One thread a worker: two that spin on small matrices beside another worker take four times the processor. A worker runs
# whole files where it can, so that what a file sets up is set up once, and takes over from another at the end.
# mypy works on one core for half a minute: beside them, with its words after theirs.
test: lint browser
	@said=$$(mktemp); $(BIN)/mypy >$$said 2>&1 & types=$$!; \
	export OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} NEARFAR_PACKAGES=required; failed=0; \
	$(BIN)/python -m pytest $(SHARED) --durations=10 || failed=1; \
	wait $$types || failed=1; echo "== mypy"; cat $$said; rm -f $$said; exit $$failed

# Where nothing can be installed, such as on a GPU machine: the tests with the packages that PYTHON has. Those that need
# another package are skipped with the reason; those of a GPU run where one is.
gpu:
	PYTHONPATH=$(CURDIR)/src OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PYTHON) -m pytest $(SHARED) -rs

check: lint
	$(BIN)/mypy

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The report page is tested in a real browser; nothing outside the project is installed without a word.
browser:
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do \
		if command -v $$name >/dev/null; then exit 0; fi; \
	done; \
	if [ "$(BROWSER)" = skip ] || [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
		echo "No browser is here and none is installed: the tests of the report page will be skipped."; \
	else \
		echo "No browser is here: apt-get installs Chromium now, outside the project (BROWSER=skip leaves it out)."; \
		(apt-get update -q && apt-get install -y -q chromium) \
			|| echo "Chromium could not be installed: the tests of the report page will be skipped."; \
	fi

bench: $(READY)
	$(BIN)/python benchmarks/speed/dense.py
	$(BIN)/python benchmarks/speed/tiled.py
	$(BIN)/python benchmarks/speed/figure3.py
	$(BIN)/python benchmarks/speed/gathered.py
	$(BIN)/python benchmarks/speed/cached.py
	$(BIN)/python benchmarks/speed/samplers.py
	$(BIN)/python benchmarks/speed/evaluate.py
	$(BIN)/python benchmarks/speed/search.py
	$(BIN)/python benchmarks/speed/import_time.py

FIRST ?= 0
COUNT ?= 10000
KERNELS ?= 2000
# Random losses against oracles: COUNT of them on dense and tiled, KERNELS of them on fused too, in Triton's interpreter.
# make fuzz FIRST=3500 goes on from there; what fails says how it is run again.
fuzz: $(READY)
	$(BIN)/python tests/support/fuzz_run.py --first $(FIRST) --count $(COUNT)
	TRITON_INTERPRET=1 $(BIN)/python tests/support/fuzz_run.py --kernels --first $(FIRST) --count $(KERNELS)

MINUTES ?= 60
# Whether the tests notice 240 small changes of the sources, drawn with a fixed seed; it goes on where the last call ended.
mutants: $(READY)
	OMP_NUM_THREADS=1 nice $(BIN)/python scripts/mutants.py --minutes $(MINUTES)

faults: $(READY)  # kills, races, full disks, damaged files; SEED=7 repeats a run
	$(BIN)/python tests/support/faults.py $(if $(SEED),--seed $(SEED))
	$(BIN)/python tests/support/faults_index.py $(if $(SEED),--seed $(SEED))

docs: $(READY)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q $(SHARED) $(DOCTESTS)

# The pages and the reference as a site in build/site, to be opened from disk: no broken link, no missing reference.
site: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The tables in documents that are written from the sources; a test compares each with its page.
TABLES := engine_ways losses_page pml_names
tables: $(READY)
	for name in $(wildcard $(TABLES:%=scripts/%.py)); do $(BIN)/python $$name || exit 1; done

# The same answers whatever the processor: other kernels of torch, MKL and OpenBLAS, other threads, another hash seed.
portable: $(READY)
	@export PYTHONHASHSEED=$$(od -An -N2 -tu2 /dev/urandom | tr -d " "); failed=""; \
	for setting in $(SETTINGS); do \
		echo "== $$setting PYTHONHASHSEED=$$PYTHONHASHSEED"; \
		env $$setting $(BIN)/python -m pytest -q $(SHARED) $(DOCTESTS) $(NUMERICAL) || failed="$$failed $$setting"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed under:$$failed (PYTHONHASHSEED=$$PYTHONHASHSEED)"; exit 1; fi

# The oldest releases of all that users install, none of which may be asked for unless the tests have run on it. They warn
# of what has since been deprecated under them; that is no failure here. What writes ONNX is left out, which PyTorch 2.11
# brought into its present form.
lowest:
	$(call INSTALL_FOR_TESTS,.venv-lowest,constraints-lowest.txt,.[test])
	.venv-lowest/bin/python -m pip uninstall --quiet --yes onnxscript
	.venv-lowest/bin/python -m pytest $(SHARED) -W default::DeprecationWarning -W default::FutureWarning \
		-W "ignore:TypedStorage is deprecated"

# What is released: an archive of the sources and a wheel. What an older build left behind would slip into the wheel.
dist: $(READY)
	rm -rf dist build/lib build/bdist.*
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	@for wheel in dist/*.whl; do \
		bytes=$$(wc -c < $$wheel); echo "$$wheel: $$bytes bytes"; \
		if [ $$bytes -ge 1000000 ]; then echo "$$wheel: a megabyte is too much for a wheel of text."; exit 1; fi; \
	done

$(BASE): pyproject.toml constraints.txt
	$(call INSTALL,.venv,constraints.txt,.)
	touch $@

$(READY): $(BASE)
	$(call INSTALL_FOR_TESTS,.venv,constraints.txt,.[dev])
	touch $@

clean:
	rm -rf .venv .venv-lowest build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
