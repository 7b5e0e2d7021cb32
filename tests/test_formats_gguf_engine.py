"""A real engine (ik_llama.cpp) loads what we write and generates what transformers does.

It runs in a process of its own: a wrong file would end it by a signal. Limits of the engine (0.1.5) shape this test.
Its llama graph adds a mixture of experts to the normalised input instead of the residual: mirroring that in
transformers makes Mixtral agree, which proves names and layout all the same. Its GPT-2 graph norms the feed-forward
input without mean and bias, and stops; there transformers' own GGUF loader is the second reader.
"""

import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import PROMPT, Reference, agreement, decided, pick, reference
from llama_engine import ask
from quantised import decoded, write_model, write_quantised
from tokenizers import Tokenizer

from formats.containers import open_checkpoint
from formats.containers.gguf import GGUFContainer, reorder_rows, rotary_order
from formats.containers.safetensors import SafetensorsContainer
from formats.grids import parse_grid
from formats.qtensor import QTensor

pytest.importorskip("ik_llama_cpp")

PROMPTS = ["Hello <|im_start|>world", "In 1969 three", "def mean(values):\n  ", "the dog's caf\u00e9"]
EMBEDDED = Path(__file__).parents[1] / "recipes/quickstart/model"


def engine(path: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of the prompts, and eight greedy ones after each."""
    found = ask(path, path.parent / "engine.npz", texts=PROMPTS)
    tokens = [found[f"tokens-{i}"].tolist() for i in range(len(PROMPTS))]
    found = ask(path, path.parent / "engine.npz", rows=tokens, generate=8)
    return tokens, [found[f"greedy-{i}"].tolist() for i in range(len(tokens))]


def greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    for _ in range(count):
        with torch.no_grad():
            tokens = [*tokens, int(model(torch.tensor([tokens])).logits[0, -1].argmax())]
    return tokens[len(tokens) - count :]


def add_experts_to_the_norm(model: Any) -> None:
    for layer in model.model.layers:
        seen: dict[str, Any] = {}
        layer.post_attention_layernorm.register_forward_hook(
            lambda _, inputs, output, seen=seen: seen.update(residual=inputs[0], normed=output)
        )
        layer.register_forward_hook(lambda _, __, output, seen=seen: output - seen["residual"] + seen["normed"])


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {}),
        ("mistral", {"head_dim": 32}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("gemma3_text", {"layers": 6}),  # the sixth layer is the first without a window: the engine needs one
        ("mixtral", {}),
        ("qwen3_moe", {}),
    ],
)
def test_greedy_tokens_of_every_family(
    model_type: str, options: dict[str, int], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    directory = tiny_model(model_type, **options)
    source = SafetensorsContainer().open_reader(directory)
    writer = GGUFContainer().open_writer(tmp_path, source, {}, {})
    for name in source.names():
        writer.write(name, source.read(name))
    writer.close()
    tokens, generated = engine(tmp_path / "model.gguf")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))  # transformers has rules of its own for Qwen 2
    assert tokens == [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    if model_type == "mixtral":
        add_experts_to_the_norm(model)
    expected = [greedy(model, prompt, len(found)) for prompt, found in zip(tokens, generated, strict=True)]
    assert sum(a == b for a, b in zip(expected, generated, strict=True)) >= 3  # random models have near ties


def test_every_grid_loads_and_stays_near_the_decoded_weights(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """One linear per grid in one file; engines round activations to 8 bits, so only the first token is compared."""
    from transformers import AutoModelForCausalLM

    directory = tiny_model("llama", hidden=256, layers=2)
    source = SafetensorsContainer().open_reader(directory)
    kinds = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"]
    linears = [f"{name}.weight" for i in range(2) for name in source.arch.linears(i)]
    grids = {name: parse_grid(kind) for name, kind in zip(linears, kinds, strict=False)}
    writer = GGUFContainer().open_writer(tmp_path, source, grids, {})
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for name in source.names():
        value = source.read(name)
        if name in grids:
            assert isinstance(value, torch.Tensor)
            params = grids[name].fit(value)
            value = QTensor(grids[name], grids[name].encode(value, params), params)
            model.get_parameter(name).data = value.dequantize()
        writer.write(name, value)
    writer.close()
    tokens, generated = engine(tmp_path / "model.gguf")
    near = 0
    for prompt, found in zip(tokens, generated, strict=True):
        with torch.no_grad():
            top = model(torch.tensor([prompt])).logits[0, -1].topk(3).indices.tolist()
        near += found[0] in top
    assert near >= 3


def test_transformers_loads_gpt2_as_we_do(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    directory = tiny_model("gpt2", n_positions=1024)  # its loader knows no other length
    source = SafetensorsContainer().open_reader(directory)
    writer = GGUFContainer().open_writer(tmp_path, source, {}, {})
    for name in source.names():
        writer.write(name, source.read(name))
    writer.close()
    ids = torch.arange(3, 67)[None]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)(ids).logits
        found = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)(ids).logits
    assert (found[..., :384] - expected).abs().max() < 1e-4


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """The embedded model in q4_1, and what its decoded weights do after pieces of Python."""
    from transformers import AutoModelForCausalLM

    out = tmp_path_factory.mktemp("rounded")
    with open_checkpoint(EMBEDDED) as source:
        write_quantised(source, out, "gguf", "q4_1")
    model = AutoModelForCausalLM.from_pretrained(decoded(out, out / "decoded"), dtype=torch.float32)
    ids = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json")).encode(Path(textwrap.__file__).read_text()).ids
    return out, reference(model, torch.tensor(ids[: 40 * PROMPT]).view(40, PROMPT))


def test_decided_prompts_are_continued_with_the_same_tokens(rounded: tuple[Path, Reference], tmp_path: Path) -> None:
    found = agreement(rounded[0] / "model.gguf", decided(rounded[1]), tmp_path)
    assert sum(found.same) >= 9


def test_elsewhere_the_engine_differs_in_near_ties_only(rounded: tuple[Path, Reference], tmp_path: Path) -> None:
    chosen = pick(rounded[1], list(range(10)))
    found = agreement(rounded[0] / "model.gguf", chosen, tmp_path)
    assert found.near(chosen), found


def unpermuted(q: QTensor) -> QTensor:
    """Query rows in an order that GGUF's llama family does not have."""
    return reorder_rows(q, torch.argsort(rotary_order(q.shape[0], 32)))


def swapped(q: QTensor) -> QTensor:
    """The two halves of every block swapped: nibbles in the wrong order."""
    return replace(q, codes=q.codes.unflatten(1, (-1, 2, 16)).flip(2).flatten(1))


@pytest.mark.parametrize(("kind", "damage"), [("q_proj", unpermuted), ("down_proj", swapped)])
def test_one_damaged_tensor_is_seen_either_way(
    rounded: tuple[Path, Reference], tmp_path: Path, kind: str, damage: Callable[[QTensor], QTensor]
) -> None:
    out, everything = rounded
    with open_checkpoint(out) as source:
        values = {n: q for n in source.names() if isinstance(q := source.read(n), QTensor)}
        name = next(n for n in values if kind in n)
        write_model(source, tmp_path, "gguf", values | {name: damage(values[name])})
    clear = decided(everything)
    found = agreement(tmp_path / "model.gguf", clear, tmp_path)
    assert sum(found.same) < 9
    assert not found.near(clear)
