# make venv | test | quick | docs | demo | reliability | fmt | coverage | fuzz | bench | bench-scale | bench-peers |
# minimum | dist | pins | verify-pins.
# Every target sets up what it needs by itself.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -qq
STAMP  := $(VENV)/.installed
OTHERS := $(VENV)/.frameworks-installed
PINS   := tools/constraints.txt
PEERS  := build/bench/venv
APT    := env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends -o Dpkg::Use-Pty=0 chromium
PEERS_PIP := $(PEERS)/bin/python -m pip --disable-pip-version-check -qq

export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: browser emulators venv test quick docs dist minimum lint fmt coverage demo reliability fuzz bench bench-scale bench-peers pins verify-pins clean

venv: $(STAMP)

# torch is named by its exact version in a step of its own, so that pip takes a local CPU wheel where there is one.
# The build backend is pinned as well: it is installed here instead of in pip's isolated build environment.
$(STAMP): pyproject.toml $(PINS)
	@echo "setting up $(VENV) (once, and when pyproject.toml or $(PINS) change)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -c $(PINS) torch==2.13.0 hatchling editables
	@$(PIP) install -c $(PINS) --no-build-isolation -e '.[dev]'
	@touch $@

# Training frameworks that tests/frameworks run with: 0.6 GB and about a minute.
$(OTHERS): $(STAMP)
	@echo "installing training frameworks into $(VENV)"
	@$(PIP) install -c $(PINS) --no-build-isolation -e '.[frameworks]'
	@touch $@

# All that CI runs. pytest comes last: its closing line is the verdict.
# One thread each: the tests start many processes, and two cores have no use for more.
test: export OMP_NUM_THREADS := 1
test: lint
	python -m pytest -q -m "not rest" -n 2 --dist loadfile
	@$(MAKE) --no-print-directory $(OTHERS) browser
	python -m pytest -q -m rest

# Without what is slow or starts several processes.
quick: $(STAMP)
	python -m pytest -q -m "not slow and not distributed and not rest"

lint: $(STAMP)
	ruff check .
	ruff format --check .
	mypy

fmt: $(STAMP)
	ruff check --fix .
	ruff format .

coverage: $(STAMP)
	python -m pytest -q --cov --cov-report=term

# The site, from docs/ and docstrings, into build/site; broken links fail.
docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 mkdocs build --strict -q

# sdist and wheel, with the build backend that is pinned.
dist: $(STAMP)
	@python -m build --no-isolation

# An environment with the lowest versions that pyproject.toml allows, and what is neither slow nor needs an extra.
# torch 2.4 pulls gigabytes: TORCH=2.4.1 asks for it, where there are some.
minimum: $(STAMP)
	@test -x build/minimum/bin/python || $(PYTHON) -m venv build/minimum
	@build/minimum/bin/python -m pip --disable-pip-version-check -qq install -c tools/minimum.txt \
		torch==$(or $(TORCH),2.13.0) hatchling editables \
		pytest pytest-timeout hypothesis pydantic pillow psutil torchdata 'moto[server]'
	@build/minimum/bin/python -m pip --disable-pip-version-check -qq install -c tools/minimum.txt --no-build-isolation -e .
	@build/minimum/bin/shardstream --help > build/minimum/help.txt
	build/minimum/bin/python -m pytest -q -p no:cacheprovider -m "not slow and not distributed and not rest" \
		tests/test_*.py tests/torch tests/formats --ignore tests/test_stores.py --ignore tests/formats/test_arrow.py

demo: $(STAMP)
	@python tools/demo.py

# A minute for each reader; with ENGINE=atheris (pip install atheris) by what reaches new code. Findings: build/fuzz.
fuzz: $(STAMP)
	@python -m tools.fuzz --seconds $(or $(SECONDS),60) --engine $(or $(ENGINE),hypothesis) $(TARGETS)

# A server that speaks Azure's protocol, for tests/test_stores.py, which goes without where it is missing. Needs npm.
emulators:
	npm install --no-audit --no-fund --prefix build/emulators azurite@3.37.0

# Chromium, for tests/report/test_browser.py, where apt-get may install it: 0.4 GB and a minute. Else they are skipped.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { \
	    echo "installing Chromium"; test "$$(id -u)" = 0 && { timeout 300 $(APT) || { apt-get update -qq && timeout 300 $(APT); }; }; \
	} || echo "Chromium cannot be installed here: tests in a browser will be skipped"

# Kills, cuts, failing stores, and a soak of hours; each alone: python -m tools.reliability --run chaos. Cuts need root.
reliability: $(STAMP)
	@python -m tools.reliability --run chaos --run chaos-fixed --run two-hosts --run faults --run fuzz --run soak

# Half an hour and 6 GB; LARGE=--large adds the large blocks of the memory suite. Peers take part where they are installed.
bench: $(STAMP)
	@python -m tools.bench prepare $(LARGE)
	@python -m tools.bench all $(LARGE)

# What planning costs for 10^5 to 10^9 samples and 1 to 1,024 ranks, beside the orders of others.
bench-scale: $(STAMP)
	@python -m tools.bench all --growth --repetitions 3

# Peers live in an environment of their own. litdata asks for torchvision, which it does not need here.
bench-peers: $(PEERS)/.installed

$(PEERS)/.installed: tools/bench/constraints.txt
	@echo "setting up $(PEERS) (once, and when $< changes)"
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@$(PEERS_PIP) install -c $< torch==2.13.0
	@$(PEERS_PIP) install -c $< webdataset datasets torchdata psutil boto3 lightning-utilities obstore requests tifffile
	@$(PEERS_PIP) install -c $< --no-deps litdata
	@touch $@

# Pins what the virtual environment holds now, without local version labels, paths and this package.
pins: $(STAMP)
	@{ sed -n '/^#/p' $(PINS); $(PIP) freeze --exclude-editable | grep '==' | sed 's/+.*//' | sort -f; } > $(PINS).new && mv $(PINS).new $(PINS)

# Whether the index gives the files whose hashes are known (not part of `make test`: it needs the index, and one platform).
verify-pins: $(STAMP)
	@python tools/pins.py check

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage*
