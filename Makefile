# What a contributor runs; CONTRIBUTING.md says when. `.ci/run` runs all of it in a fresh environment.
.PHONY: check test test-all nightly wheel docs site generate

check: ## lint, types, import rules, generated pages
	ruff format --check .
	ruff check .
	mypy
	lint-imports
	python -m tests.tools.reference --check

test: ## the default tests
	python -m pytest

test-all: ## and the thorough and the slow ones
	python -m pytest -m "not gpu and not exhaustive and not network"

nightly: ## quickstart, default tests and architectures on the oldest and newest versions; slow tests
	bash .ci/nightly

wheel: ## sdist and wheel into build/wheel/dist, installed from there without this tree; the quickstart
	bash .ci/wheel build/wheel

docs: ## the documentation, into site/
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict

site: ## the planning page, which runs in the browser alone, into build/site/
	python -m tests.tools.site

generate: ## write what comes from the code: facts of shapes, parts of README and docs, recipes
	python -m tests.tools.facts
	python -m tests.tools.reference
	python -m tests.tools.gallery
