"""Shared fixtures: random tiny models of every family, as Hugging Face directories."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

torch.set_num_threads(1)

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt2", "mixtral", "qwen3_moe")


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """A byte-level BPE tokenizer of 384 tokens, with GPT-2's splitting, two chat tokens and a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"), "isolated"
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        [
            "The quick brown fox jumps over the lazy dog, and the dog does not care about the fox at all.\n",
            "In 1969 three people flew to the moon; two of them walked on it. What was the weather like?\n",
            "def mean(values):\n    return sum(values) / len(values)\n\n# Caf\u00e9s aren't open on the 12th.\n",
        ]
        * 4,
        trainer,
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    )


def tiny_config(model_type: str, hidden: int, layers: int, vocab: int, **overrides: Any) -> Any:
    """A transformers config of `hidden` width (a multiple of 64): 4 heads, 2 of keys, tied as the family ties."""
    from transformers import AutoConfig

    if model_type == "gpt2":
        sizes: dict[str, Any] = dict(n_embd=hidden, n_layer=layers, n_head=4, n_positions=256)
    else:
        sizes = dict(
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=hidden // 4,
            max_position_embeddings=256,
            tie_word_embeddings=model_type in ("gemma3_text", "qwen3"),
        )
    if model_type == "gemma3_text":
        sizes |= dict(query_pre_attn_scalar=hidden // 4, sliding_window=32, layer_types=None)
    if model_type == "mistral":
        sizes |= dict(sliding_window=None)
    if model_type == "mixtral":
        sizes |= dict(num_local_experts=4, num_experts_per_tok=2)
    if model_type == "qwen3_moe":
        sizes |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=hidden, norm_topk_prob=True)
    return AutoConfig.for_model(
        model_type, vocab_size=vocab, bos_token_id=0, eos_token_id=2, pad_token_id=0, **(sizes | overrides)
    )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Callable[..., Path]:
    """tiny_model(model_type, hidden=64, layers=2, **config) -> directory of a random float32 model with a tokenizer.

    Directories are shared by the session: copy before changing one. hidden=256 makes every grid applicable.
    """
    made: dict[str, Path] = {}

    def make(model_type: str = "llama", hidden: int = 64, layers: int = 2, **overrides: Any) -> Path:
        from transformers import AutoModelForCausalLM

        key = repr((model_type, hidden, layers, sorted(overrides.items())))
        if key not in made:
            overrides = dict(overrides)
            vocab = overrides.pop("vocab_size", 384)
            config = tiny_config(model_type, hidden, layers, vocab, **overrides)
            with torch.random.fork_rng():
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
                for name, parameter in model.named_parameters():
                    if parameter.dim() == 1:  # norms and biases start at 1 and 0, which hides mistakes
                        parameter.data += 0.1 * torch.randn_like(parameter)
                    elif "embed" not in name:
                        parameter.data *= 4  # wider logits than transformers' 0.02
            out = tmp_path_factory.mktemp(f"{model_type}-{hidden}")
            model.generation_config.pad_token_id = 0
            model.save_pretrained(out)
            tiny_tokenizer.save_pretrained(out)
            made[key] = out
        return made[key]

    return make
