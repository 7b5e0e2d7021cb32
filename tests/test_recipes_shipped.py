"""Every recipe that ships is valid, says what it is for, and finds the files it names."""

from pathlib import Path

import pytest

from compress.recipe_file import dump_recipe, load_recipe, shipped

RECIPES = shipped()
FILES = [*RECIPES.values(), Path(__file__).parent.parent / "recipes" / "quickstart" / "recipe.yaml"]
IDS = [path.stem if path.stem != "recipe" else "quickstart" for path in FILES]


def test_the_promised_ones_are_there():
    promised = {"gptq-w4g128", "w8a8", "awq", "gguf-q4_k_m", "gguf-3bpw", "nf4", "fast-q8"}
    assert promised <= set(RECIPES)
    gated = [name for name in RECIPES if name.startswith("pipeline-")]
    assert gated
    for name in gated:
        evaluate = load_recipe(name).evaluate
        assert evaluate is not None and evaluate.gate.max_kld is not None


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_it_begins_by_saying_what_it_is_for(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = lines[: next(i for i, line in enumerate(lines) if not line.startswith("# "))]
    assert len(comment) >= 2
    assert lines[len(comment)] == "version: 1"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_it_is_valid_and_resolves(path, tmp_path):
    recipe = load_recipe(str(path))
    assert recipe.description
    assert recipe.evaluate is not None
    assert Path(recipe.evaluate.perplexity.data).is_file()
    (tmp_path / "resolved.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(str(tmp_path / "resolved.yaml")) == recipe
