"""Every recipe that ships is valid, says what it is for, finds the files it names, and runs."""

from pathlib import Path

import pytest

from compress.catalogue import catalogue, measured, recipe_rows
from compress.pipeline import run
from compress.plan import make_plan
from compress.progress import Progress
from compress.recipe_file import dump_recipe, load_recipe, shipped
from formats.containers import open_checkpoint
from formats.qtensor import QTensor

QUICKSTART = Path(__file__).parent.parent / "recipes" / "quickstart"
RECIPES = shipped()
FILES = [*RECIPES.values(), QUICKSTART / "recipe.yaml"]
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


@pytest.mark.parametrize("name", RECIPES)
def test_plan_leaves_no_linear_behind(name):
    with open_checkpoint(QUICKSTART / "model") as checkpoint:
        plan = make_plan(load_recipe(name), checkpoint)
    linears = [linear for i in range(4) for linear in checkpoint.arch.linears(i)]
    assert {f"{linear}.weight" for linear in linears} <= set(plan.grids)
    assert not [row.note for row in plan.rows if row.note]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("fast-q8", "nf4") else pytest.mark.slow) for name in RECIPES]
)
def test_it_runs_on_a_tiny_model(name, tiny_model, tmp_path):
    settings = [
        f"calibration.data={QUICKSTART / 'calib.txt'}",
        "calibration.samples=4",
        "calibration.length=32",
        "evaluate.perplexity.length=32",
        "evaluate.perplexity.chunks=1",
    ]
    if name.startswith("pipeline-"):  # random weights must not pass or fail a gate by chance
        settings += ["evaluate.gate={}"]
    model = tiny_model("llama", hidden=256, layers=1)
    recipe = load_recipe(name, settings)
    summary = run(recipe, str(model), tmp_path / "out", progress=Progress(quiet=True), command=f"quantize run {name}")
    assert summary["bytes"] > 0
    with open_checkpoint(tmp_path / "out") as checkpoint:
        assert any(isinstance(checkpoint.read(n), QTensor) for n in checkpoint.names())


def test_the_table_of_measured_losses_fits_the_recipes():
    """What `quantize list recipes` shows; tests/bench/shipped.py makes it."""
    table = measured()
    assert table["recipes"] and set(table["recipes"]) <= set(RECIPES)
    for name, figures in table["recipes"].items():
        assert 0 < figures["kld"] < 1 and figures["kld_stderr"] < figures["kld"], name
        assert figures["ppl"] > 0.95 * figures["ref_ppl"]
        load_recipe(name, figures["settings"])
    header, rows, _ = recipe_rows(catalogue("recipes"))
    shown = dict(zip(header, next(row for row in rows if row[0] == "fast-q8"), strict=True))
    assert shown["MB"] == "143.0" and float(shown["KLD"]) < 0.01


@pytest.mark.xfail(reason="the loop of tests/bench/shipped.py has not been through all of them", strict=True)
def test_every_recipe_is_measured():
    assert set(measured()["recipes"]) == set(RECIPES)
