"""What can fail late is tried early."""

import shutil
from types import SimpleNamespace

import psutil
import pytest
from safetensors.torch import load_file, save_file

from compress.plan import make_plan
from compress.preflight import check_finite, check_lengths, check_round_trip, check_tokenizer, preflight
from compress.recipe import Recipe
from formats.containers import open_checkpoint
from formats.dense import load_tokenizer
from formats.errors import DataError, ResourceError, UsageError


def recipe(grid="int4-g32", format="gptq", algorithm="rtn", **more):
    step = {"algorithm": algorithm, "grid": grid}
    return Recipe.model_validate({"version": 1, "steps": [step], "output": {"format": format}} | more)


@pytest.fixture
def opened(tiny_model):
    with open_checkpoint(tiny_model()) as checkpoint:
        yield checkpoint


def test_a_sound_model_passes(opened, tmp_path):
    steps = []
    preflight(make_plan(recipe(), opened), opened, tmp_path / "out", load_tokenizer(opened), lambda *s: steps.append(s))
    assert steps[-1] == (len(opened.names()),) * 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_weight_is_named(tiny_model, tmp_path, bad):
    shutil.copytree(tiny_model(), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = bad
    save_file(tensors, file, {"format": "pt"})
    message = r"model\.layers\.1\.mlp\.up_proj\.weight has 1 NaN or infinite"
    with open_checkpoint(tmp_path / "model") as checkpoint, pytest.raises(DataError, match=message) as caught:
        check_finite(checkpoint, lambda done, total: None)
    assert caught.value.exit_code == 3


def test_too_little_disk_or_memory(opened, tmp_path, monkeypatch):
    plan, tokenizer = make_plan(recipe(), opened), load_tokenizer(opened)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        with pytest.raises(ResourceError, match="MB of disk are needed"):
            preflight(plan, opened, tmp_path / "out", tokenizer)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(ResourceError, match="GB of memory are needed") as caught:
        preflight(plan, opened, tmp_path / "out", tokenizer)
    assert caught.value.exit_code == 4


def test_rows_longer_than_the_context(opened):
    text = {"samples": 1, "length": 512}
    with pytest.raises(UsageError, match="512 tokens, but the model's context is 256"):
        check_lengths(make_plan(recipe(algorithm="gptq", calibration=text), opened), opened)
    check_lengths(make_plan(recipe(calibration=text), opened), opened)  # rounding looks at no text
    evaluate = {"perplexity": {"data": "x.txt", "length": 300}}
    with pytest.raises(UsageError, match=r"evaluate\.perplexity\.length: 300 tokens"):
        check_lengths(make_plan(recipe(evaluate=evaluate), opened), opened)


def test_a_tokenizer_that_is_not_the_models(opened, tiny_tokenizer):
    check_tokenizer(opened, tiny_tokenizer)

    class Foreign:
        def __init__(self, ids, text):
            self.ids, self.text = ids, text

        def __call__(self, *_, **__):
            return SimpleNamespace(input_ids=self.ids)

        def decode(self, *_, **__):
            return self.text

    for ids, text, message in (
        ([], "", "turns text into nothing"),
        ([400], "", "gives token 400, but the embedding has 384 rows"),
        ([3], "something else", "does not give back its text"),
    ):
        with pytest.raises(DataError, match=message):
            check_tokenizer(opened, Foreign(ids, text))


@pytest.mark.parametrize(
    ("grid", "format", "family"),
    [
        ("int4-g32", "gptq", "llama"),
        ("int3-g32-sym", "gptq", "gpt2"),
        ("int4-g32", "awq", "llama"),
        ("int4-g32", "compressed-tensors", "qwen3"),
        ("q4_1", "gguf", "llama"),
        ("q4_0", "gguf", "gpt2"),
        ("q4_1", "gguf", "gemma3_text"),
        ("int4-g32", "safetensors", "llama"),
    ],
)
def test_one_tensor_goes_through_every_container(tiny_model, grid, format, family):
    with open_checkpoint(tiny_model(family)) as checkpoint:
        check_round_trip(make_plan(recipe(grid, format), checkpoint), checkpoint)


def test_a_container_that_changes_values_is_caught(opened, monkeypatch):
    from formats.containers.gptq import GPTQLayout

    unpack = GPTQLayout.unpack

    def wrong(self, *args):
        tensor = unpack(self, *args)
        tensor.codes[0, 0] ^= 1
        return tensor

    monkeypatch.setattr(GPTQLayout, "unpack", wrong)
    with pytest.raises(AssertionError, match="changed on its way through the gptq container"):
        check_round_trip(make_plan(recipe(), opened), opened)
