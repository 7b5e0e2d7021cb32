"""Recipes: every mistake at once with its place, overrides from the command line, and a dump that loads again."""

import contextlib
import random

import pytest

from compress.recipe import Recipe, parse_size, with_bits
from compress.recipe_file import dump_recipe, find_recipe, load_recipe, shipped
from formats.errors import UsageError

GOOD = """\
version: 1
seed: 3
calibration: {data: calib.txt, samples: 128, length: 512}
steps:
  - {algorithm: awq}
  - {algorithm: gptq, grid: {bits: 4, group_size: 64, symmetric: false}, damp: 1e-2}
overrides: [{match: "*.down_proj", grid: q8_0}, {match: "*.mlp.*", bits: 3}, {match: lm_head, skip: true}]
output: {format: gguf}
evaluate: {perplexity: {data: wiki.txt, length: 512, chunks: 20}, gate: {max_kld: 0.1}}
"""


@pytest.fixture
def write(tmp_path):
    def write(text, name="r.yaml"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


def errors(path, settings=()):
    with pytest.raises(UsageError) as caught:
        load_recipe(path, settings)
    assert caught.value.exit_code == 2
    return [line.replace(path, "r.yaml") for line in str(caught.value).splitlines()]


def test_a_good_recipe(write):
    recipe = load_recipe(write(GOOD))
    assert recipe.grid == "int4-g64"
    assert recipe.steps[1].damp == 0.01  # 1e-2 is a number, as in YAML 1.2
    assert recipe.needs_text and recipe.calibration_seed == 3
    assert recipe.override("model.layers.0.mlp.down_proj").grid == "q8_0"  # the first match wins
    assert recipe.override("model.layers.0.mlp.up_proj").bits == 3
    assert recipe.override("model.layers.0.self_attn.q_proj") is None


def test_all_mistakes_at_once_in_order_with_their_places(write):
    bad = """\
version: 1
sed: 0
calibration: {data: calib.txt, samples: "128", lenght: 3}
steps:
  - {algorithm: awq, grid: q4k}
  - {algorithm: gptqq, grid: q4_1}
  - {algorithm: gptq, grid: {bits: 9, symetric: true}}
output: {format: guf}
seed: 1
seed: 2
evaluate: {perplexity: {length: 512}, gate: {max_kld: -1}}
"""
    assert errors(write(bad)) == [
        'r.yaml:2:1: unknown key "sed"; did you mean "seed"?',
        "r.yaml:3:41: calibration.samples: should be a valid integer, got '128'",
        'r.yaml:3:48: unknown key "lenght"; did you mean "length"?',
        'r.yaml:5:28: steps.0.grid: unknown grid "q4k"; did you mean "q4_k"?',
        'r.yaml:6:5: unknown algorithm "gptqq"; did you mean "gptq"?',
        "r.yaml:6:5: only awq may stand before another step",
        "r.yaml:7:36: steps.2.grid.bits: should be less than or equal to 8, got 9",
        'r.yaml:7:39: unknown key "symetric"; did you mean "symmetric"?',
        'r.yaml:8:18: output.format: unknown output format "guf"; did you mean "gguf"?',
        'r.yaml:10:1: duplicate key "seed" (first at r.yaml:9:1)',
        'r.yaml:11:24: missing key "data"',
        "r.yaml:11:55: evaluate.gate.max_kld: should be greater than or equal to 0, got -1",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("version: 1", "version: 2"), "version"),
        (("seed: 3", "seed: yes"), "seed: should be a valid integer, got True"),
        (("damp: 1e-2", "damp: low"), "damp: should be a valid number, got 'low'"),
        (("damp: 1e-2", "damp: 0"), "damp: should be greater than 0, got 0"),
        (("output: {format: gguf}", ""), 'missing key "output"'),
        (("steps:", "step:"), 'unknown key "step"; did you mean "steps"?'),
        (("group_size: 64", "group_size: 0"), "group_size must be positive"),
        (("group_size: 64", "group_size: row"), "group_size: should be a valid integer, got 'row'"),
        (("grid: q8_0}", "grid: q8_0, skip: true}"), "give exactly one of grid, bits and skip"),
        (("seed: 3", "allocate: {candidates: [q4_1]}"), "give exactly one of target_bpw and target_size"),
        (("seed: 3", "allocate: {target_size: 1.2.3MB, candidates: [q4_1]}"), "is not a size"),
        (("{algorithm: awq}", "[]"), "steps.0: should be a mapping"),
        (("{algorithm: awq}", "{damp: 1}"), 'a step is a mapping with an "algorithm"'),
        (("{format: gguf}", "gguf"), "output: should be a mapping"),
        (("{algorithm: awq}", "{algorithm: awq}\n  - {algorithm: rtn}"), "only awq may stand before"),
        (("grid: {bits: 4, group_size: 64, symmetric: false}, ", ""), "this step needs a grid"),
        (("seed: 3", "seed: &s 3\ncalibration: *s\nx: {"), "not valid YAML"),
        (("seed: 3", "description: &a hm\nmodel: *a"), "anchors are not supported"),
        (("seed: 3", "\tseed: 3"), "not valid YAML"),
        ((GOOD, "- 1"), "a recipe is a mapping"),
        ((GOOD, ""), "a recipe is a mapping"),
    ],
)
def test_each_mistake_is_named(write, change, message):
    lines = errors(write(GOOD.replace(*change)))
    assert any(message in line for line in lines), lines
    assert all(line.startswith(("r.yaml", "  fix")) for line in lines), lines


def test_an_allocation_gives_the_steps_their_grids(write):
    text = GOOD.replace("grid: {bits: 4, group_size: 64, symmetric: false}, ", "")
    recipe = load_recipe(
        write(text + "allocate: {target_size: 1.5GiB, candidates: [q4_1, {bits: 3, group_size: 32}]}\n")
    )
    assert recipe.allocate.target_size == 3 << 29
    assert recipe.allocate.candidates == ["q4_1", "int3-g32"]


def test_settings_from_the_command_line(write, tmp_path, monkeypatch):
    path = write(GOOD)
    assert load_recipe(path, ["steps.1.bits=3"]).grid == "int3-g64"
    assert load_recipe(path, ["steps.1.grid.bits=8", "steps.1.symmetric=true"]).grid == "int8-g64-sym"
    assert load_recipe(path, ["steps.1.grid=q4_1"]).grid == "q4_1"
    assert load_recipe(path, ["steps.1.grid=int4-g32", "steps.1.bits=2"]).grid == "int2-g32"
    assert load_recipe(path, ["output.format=gptq", "evaluate=null"]).output.format == "gptq"
    assert load_recipe(path, ["overrides=[{match: '*', bits: 5}]"]).overrides[0].bits == 5
    assert load_recipe(path, ["allocate.target_bpw=4", "allocate.candidates=[q4_1]"]).allocate.target_bpw == 4
    assert errors(path, ["calibration.smples=3"]) == [
        '--set calibration.smples=3: unknown key "smples"; did you mean "samples"?'
    ]
    assert "got 'x'" in errors(path, ["steps.1.bits=x"])[0]
    assert "nothing at" in errors(path, ["steps.7.bits=3"])[0]
    assert "has no bits" in errors(path, ["steps.1.grid=q4_1", "steps.1.bits=3"])[0]
    assert "write --set steps.0.bits=3" in errors(path, ["bits"])[1]


def test_relative_paths_start_at_the_recipe_and_settings_here(write, tmp_path, monkeypatch):
    path = write(GOOD)
    (tmp_path / "calib.txt").write_text("x")
    elsewhere = tmp_path / "elsewhere with spaces é"
    elsewhere.mkdir()
    (elsewhere / "mine.txt").write_text("x")
    monkeypatch.chdir(elsewhere)
    recipe = load_recipe(path)
    assert recipe.calibration.data == [str(tmp_path / "calib.txt")]
    assert recipe.evaluate.perplexity.data == "wiki.txt"  # there is no such file: left as it is
    recipe = load_recipe(path, ["calibration.data=[mine.txt, wikitext:raw]"])
    assert recipe.calibration.data == [str(elsewhere / "mine.txt"), "wikitext:raw"]


def test_a_dump_loads_as_the_same_recipe(write):
    recipe = load_recipe(write(GOOD))
    assert load_recipe(write(dump_recipe(recipe), "again.yaml")) == recipe


def test_names_of_shipped_recipes():
    name = next(iter(shipped()))
    assert find_recipe(name) == shipped()[name]
    with pytest.raises(UsageError, match="no recipe file or shipped recipe"):
        find_recipe("no-such-recipe")
    with pytest.raises(UsageError, match="no such recipe file"):
        find_recipe("no/such.yaml")


def test_damaged_files_give_a_usage_error_or_a_recipe(write):
    """No damage, however it falls, gives anything but one of the two."""
    rng = random.Random(0)
    for _ in range(300):
        text = list(GOOD)
        for _ in range(rng.randint(1, 4)):
            i = rng.randrange(len(text))
            text[i : i + rng.randint(0, 3)] = rng.choice(
                ["", "{", "]", ":", "\n", "  ", "&a", "*a", "!!x", "'", "0", "é"]
            )
        with contextlib.suppress(UsageError):
            assert isinstance(load_recipe(write("".join(text))), Recipe)


def test_not_utf8(tmp_path):
    (tmp_path / "r.yaml").write_bytes(b"version: \xff")
    with pytest.raises(UsageError, match="cannot read the recipe"):
        load_recipe(str(tmp_path / "r.yaml"))


def test_sizes_and_widths():
    assert parse_size("90MB") == 90_000_000 and parse_size("1.5 GiB") == 3 << 29 and parse_size(7) == 7
    assert with_bits("int4-g64", 3) == "int3-g64" and with_bits("q4_0", 5) == "q5_0"
    assert with_bits("int8-channel-sym", 4) == "int4-channel-sym"
    with pytest.raises(UsageError):
        with_bits("q4_0", 3)
