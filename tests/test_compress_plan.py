"""Plans: which tensor gets which grid, sizes that come true, groups, notes and refusals."""

from math import prod

import pytest

from compress.plan import make_plan
from compress.recipe import Recipe
from formats.containers import open_checkpoint
from formats.errors import UsageError
from formats.grids import parse_grid
from formats.qtensor import QTensor

EMBED = "model.embed_tokens.weight"


def recipe(grid="int4-g32", format="gptq", **more):
    step = {"algorithm": "rtn"} | ({"grid": grid} if grid else {})
    output = {"format": format} | more.pop("output", {})
    return Recipe.model_validate({"version": 1, "steps": [step], "output": output} | more)


@pytest.fixture
def plan(tiny_model):
    def plan(grid="int4-g32", format="gptq", family="llama", hidden=64, config=None, **more):
        with open_checkpoint(tiny_model(family, hidden, **(config or {}))) as checkpoint:
            return make_plan(recipe(grid, format, **more), checkpoint)

    return plan


def grids(plan):
    return {name: grid.name for name, grid in plan.grids.items()}


def test_linears_of_the_blocks_are_quantised_and_the_rest_stays_float(plan):
    made = plan()
    assert set(grids(made).values()) == {"int4-g32"}
    assert len(made.grids) == 2 * 7
    assert "model.layers.1.mlp.down_proj.weight" in made.grids
    assert not {EMBED, "lm_head.weight", "model.norm.weight"} & made.grids.keys()


def test_gguf_stores_embedding_and_head_at_eight_bits(plan):
    made = plan("q4_0", "gguf")
    assert grids(made)[EMBED] == grids(made)["lm_head.weight"] == "q8_0"
    made = plan("q4_0", "gguf", overrides=[{"match": "*embed*", "grid": "q5_0"}, {"match": "lm_head", "skip": True}])
    assert grids(made)[EMBED] == "q5_0" and "lm_head.weight" not in made.grids


def test_overrides_match_module_names_and_the_first_wins(plan):
    made = plan(
        overrides=[
            {"match": "model.layers.0.mlp.*_proj", "grid": "int8-g32"},
            {"match": "*.down_proj", "bits": 2},
            {"match": "*.self_attn.*", "skip": True},
        ]
    )
    assert grids(made) == {
        "model.layers.0.mlp.gate_proj.weight": "int8-g32",
        "model.layers.0.mlp.up_proj.weight": "int8-g32",
        "model.layers.0.mlp.down_proj.weight": "int8-g32",
        "model.layers.1.mlp.gate_proj.weight": "int4-g32",
        "model.layers.1.mlp.up_proj.weight": "int4-g32",
        "model.layers.1.mlp.down_proj.weight": "int2-g32",
    }


def test_what_an_override_cannot_do_is_noted(plan):
    made = plan(
        config={"tie_word_embeddings": True},
        overrides=[
            {"match": "lm_head", "skip": True},
            {"match": "*.q_porj", "bits": 8},
            {"match": "*norm*", "bits": 8},
        ],
    )
    assert list(made.notes) == [
        'override "lm_head" changes nothing: the head is tied to the embedding',
        'override "*.q_porj" changes nothing: no quantisable module is left for it',
        'override "*norm*" changes nothing: no quantisable module is left for it',
    ]


def test_substitutes_are_noted(plan):
    made = plan("q4_k", "gguf")
    row = next(r for r in made.rows if r.name.endswith("0.mlp.up_proj.weight"))
    assert (row.asked.name, row.grid.name, row.note) == ("q4_k", "q5_0", "instead of q4_k")
    assert "instead of q4_k" in [c[-1] for c in made.condensed()]
    assert not any(r.note for r in plan("q4_k", "gguf", hidden=256).rows if r.asked and r.asked.name == "q4_k")


def test_a_group_that_does_not_divide_is_halved_where_the_container_needs_it(plan):
    config = {"intermediate_size": 96}
    made = grids(plan("int4-g64", "compressed-tensors", config=config))
    assert made["model.layers.0.mlp.down_proj.weight"] == "int4-g32"
    assert made["model.layers.0.mlp.up_proj.weight"] == "int4-g64"
    assert grids(plan("int4-g64", "gptq", config=config))["model.layers.0.mlp.down_proj.weight"] == "int4-g64"
    made = plan("int4-g64", "awq", config=config)  # one grid per model
    assert set(grids(made).values()) == {"int4-g32"}
    assert {r.note for r in made.rows if r.grid} == {"instead of int4-g64"}


def test_a_tensor_that_cannot_be_stored_stays_float_and_says_so(plan):
    made = plan("int3-g32", "gptq", config={"intermediate_size": 72})
    row = next(r for r in made.rows if r.name.endswith("0.mlp.down_proj.weight"))
    assert row.grid is None and row.note.startswith("stays float: GPTQ packs 3-bit codes")
    assert grids(made)["model.layers.0.self_attn.q_proj.weight"] == "int3-g32"


@pytest.mark.parametrize(
    ("grid", "format", "more", "message"),
    [
        ("q4_0", "gptq", {}, "GPTQ cannot store q4_0"),
        ("int4-g32", "gguf", {}, "cannot be stored in GGUF"),
        ("int8-g32", "gptq", {"overrides": [{"match": "*.up_proj", "grid": "q4_0"}]}, "GPTQ cannot store q4_0"),
        ("int4-g32", "gptq", {"overrides": [{"match": "*", "skip": True}]}, "nothing to quantise"),
        ("int4-g32", "gptq", {"overrides": [{"match": "*.q_proj", "bits": 8}]}, "must share a grid"),
        ("int4-g32", "gptq", {"overrides": [{"match": "*.up_proj", "skip": True}]}, "must share a grid"),
        ("int4-g32", "awq", {"overrides": [{"match": "*.down_proj", "grid": "int4-g64"}]}, "one grid per model"),
        ("int4-g32", "gptq", {"output": {"target": "llama.cpp"}}, "reads gguf, not gptq"),
        ("q4_0", "gguf", {"overrides": [{"match": "*.up_proj", "bits": 7}]}, "unknown grid"),
    ],
)
def test_what_cannot_be_is_refused(plan, grid, format, more, message):
    with pytest.raises(UsageError, match=message) as caught:
        plan(grid, format, **more)
    assert caught.value.exit_code == 2


def test_mixed_widths_within_a_fused_group_are_fine_for_gguf(plan):
    assert len(set(grids(plan("q4_0", "gguf", overrides=[{"match": "*.q_proj", "bits": 5}])).values())) == 3


def test_experts_of_a_block_share_a_grid(plan):
    override = [{"match": "*.experts.1.*", "grid": "q8_0"}]
    with pytest.raises(UsageError, match="must share a grid"):
        plan("q4_0", "gguf", "mixtral", overrides=override)
    made = plan("int4-g32", "gptq", "mixtral")
    experts = [names for group, names in made.allocatable.items() if "experts" in group]
    assert len(experts) == 2 * 2 and sorted(map(len, experts)) == [4, 4, 8, 8]  # w2, w1+w3; two blocks


def test_groups_for_the_allocation(plan):
    more = {"allocate": {"target_bpw": 5.0, "candidates": ["q4_0", "q8_0", "q5_0"]}}
    made = plan(None, "gguf", overrides=[{"match": "*.o_proj", "grid": "q8_0"}], **more)
    assert made.allocatable["embedding"] == [EMBED]
    assert not any("o_proj" in group for group in made.allocatable)  # pinned
    assert set(grids(made).values()) == {"q4_0", "q8_0"}  # q4_0 is the largest within 5 bits per weight
    more = {"allocate": {"target_size": 10**6, "candidates": ["int4-g32", "int8-g32"]}}
    made = plan(None, "gptq", **more)
    assert "embedding" not in made.allocatable
    qkv = made.allocatable["0:self_attn.q_proj+self_attn.k_proj+self_attn.v_proj"]
    assert {name.split(".")[-2] for name in qkv} == {"q_proj", "k_proj", "v_proj"}


def test_with_grids_replaces_and_checks(plan):
    made = plan("q4_k", "gguf", hidden=256)
    name = "model.layers.0.mlp.up_proj.weight"
    other = made.with_grids({name: parse_grid("q2_k")})
    assert other.grids[name].name == "q2_k" and other.nbytes < made.nbytes
    assert made.grids[name].name == "q4_k"
    with pytest.raises(UsageError, match="must share a grid"):
        plan().with_grids({name: parse_grid("int8-g32")})


@pytest.mark.parametrize(
    ("grid", "format", "family"),
    [
        ("int4-g32", "gptq", "llama"),
        ("int4-g32-sym", "compressed-tensors", "qwen3"),
        ("int4-g64", "awq", "llama"),
        ("q4_1", "gguf", "gemma3_text"),
        ("q4_0", "gguf", "gpt2"),
        ("int4-g32", "safetensors", "llama"),
    ],
)
def test_the_planned_size_is_the_files_size(tiny_model, tmp_path, grid, format, family):
    with open_checkpoint(tiny_model(family, 256)) as checkpoint:
        made = make_plan(recipe(grid, format), checkpoint)
        writer = made.container.open_writer(tmp_path, checkpoint, made.grids, made.options)
        for row in made.rows:
            value = checkpoint.read(row.name)
            if row.grid is not None:
                weight = checkpoint.read_linear(row.name)
                params = row.grid.fit(weight)
                value = QTensor(row.grid, row.grid.encode(weight, params), params)
            writer.write(row.name, value)
        writer.close()
        assert made.parameters == sum(prod(checkpoint.shape(name)) for name in checkpoint.names())
    size = sum(file.stat().st_size for file in [*tmp_path.glob("*.safetensors"), *tmp_path.glob("*.gguf")])
    assert made.nbytes == pytest.approx(size, rel=0.03)
    assert made.bits_per_weight == pytest.approx(8 * made.nbytes / made.parameters)


def test_estimates_grow_with_the_work(plan):
    small = plan()
    allocate = {"target_bpw": 4.0, "candidates": ["int4-g32"]}
    large = plan(None, "gptq", allocate=allocate, calibration={"samples": 64, "length": 128})
    assert large.peak_memory() > small.peak_memory() > 0
    assert 0 < small.seconds() <= large.seconds() + 5
    summary = small.summary()
    assert summary["bytes"] == sum(t["bytes"] for t in summary["tensors"])


def test_a_plan_reads_no_weights(tiny_model, monkeypatch):
    with open_checkpoint(tiny_model()) as checkpoint:
        monkeypatch.setattr(checkpoint, "read", lambda name: pytest.fail("read a tensor"))
        assert make_plan(recipe(), checkpoint).grids
