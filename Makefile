# One verb per job. Each makes its own .venv where there is none.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
WORKERS ?= 2

.PHONY: demo test check browser bench docs clean

demo: $(READY)
	$(BIN)/nearfar demo

test: check browser
	$(BIN)/python -m pytest -n $(WORKERS) --durations=10

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

browser:  # the report page is tested in a real one
	command -v chromium >/dev/null || (apt-get update -q && apt-get install -y -q chromium)

bench: $(READY)
	$(BIN)/python benchmarks/speed/dense.py
	$(BIN)/python benchmarks/speed/tiled.py
	$(BIN)/python benchmarks/speed/figure3.py
	$(BIN)/python benchmarks/speed/gathered.py
	$(BIN)/python benchmarks/speed/cached.py
	$(BIN)/python benchmarks/speed/samplers.py
	$(BIN)/python benchmarks/speed/evaluate.py
	$(BIN)/python benchmarks/speed/search.py

docs: $(READY)
	$(BIN)/python -m pytest docs README.md --doctest-glob=*.md

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	# The index builds torchvision for CUDA; without its dependencies it leaves the pinned torch alone.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps timm torchvision
	touch $(READY)

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
