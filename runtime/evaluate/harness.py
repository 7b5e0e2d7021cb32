"""lm-evaluation-harness on the bundled engine: any of its tasks, or tasks of your own, over packed weights.

Importing this module registers the model "bitwright", also for `lm_eval --model bitwright`.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, handle_non_serializable, make_disjoint_window

from formats.errors import UsageError
from runtime.engine import Engine
from runtime.model import load_model
from runtime.requests import Score
from runtime.sampling import SamplingParams

TASKS = Path(__file__).with_name("tasks")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@register_model("bitwright")
class BitwrightLM(TemplateLM):
    """Answers lm-eval's requests through an `Engine`, as many at once as its memory holds.

    Scores with the same context share its keys and values. The model sees at most `max_length` tokens (its positions
    less one, or what `kv_tokens` hold); longer contexts lose their front, as with lm-eval's "hf".
    """

    def __init__(
        self,
        pretrained: str,
        kernel: str = "auto",
        device: str = "cpu",
        kv_tokens: int = 8192,
        max_length: int | None = None,
        batch_size: int | str = 64,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        model = load_model(pretrained, kernel=kernel, device=device)
        self.tokenizer = model.tokenizer
        self.max_length = min(max_length or kv_tokens, model.config.max_positions - 1, kv_tokens - 1)
        running = 64 if batch_size == "auto" else int(batch_size)
        self.engine = Engine(model, self.tokenizer, kv_tokens=int(kv_tokens), max_running=running)
        self._info = {"model_name": str(model.path), "kernel": kernel, "model_dtype": str(model.dtype)}

    def get_model_info(self) -> dict[str, Any]:
        """Goes into the results' config."""
        return self._info

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        start = self.tokenizer.bos_token_id
        return self.eot_token_id if start is None else int(start)

    @property
    def tokenizer_name(self) -> str:
        return str(self._info["model_name"]).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        start = self.tokenizer.bos_token
        if add_special_tokens is None:  # as the tokenizer likes it, but never two start tokens
            add_special_tokens = not (start and string.startswith(start))
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        rendered = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return str(rendered)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """(log-probability of the continuation, is it the greedy one) for (_, context, continuation) of tokens."""
        prompts: dict[tuple[int, ...], list[int]] = defaultdict(list)  # a context and all that is asked about it
        for i, (_text, context, continuation) in enumerate(requests):
            room = self.max_length + 1 - len(continuation)
            prompts[tuple(context[-room:])].append(i)
        wanted: dict[tuple[int, int], int] = {}
        for prompt, asked in prompts.items():
            request = self.engine.add_score(prompt, [requests[i][2] for i in asked])
            wanted |= {(request, nth): i for nth, i in enumerate(asked)}
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        while self.engine.has_work():
            for output in self.engine.step():
                if isinstance(output.score, Score):
                    i = wanted[output.request_id, output.index]
                    results[i] = output.score.total, output.score.greedy
                    if requests[i][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[i][0], results[i])
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text, window by window."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for i, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, rolling):
                windows.append((None, context, continuation))
                owners.append(i)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations, cut before the first of the request's stop strings."""
        prompts, params = [], []
        for request in requests:
            context, asked = request.args
            params.append(self._sampling(asked))
            prompts.append(self.tok_encode(context)[-(self.max_length - params[-1].max_tokens) :])
        texts = [completions[0].text for completions in self.engine.generate(prompts, params)]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _sampling(self, asked: dict[str, Any]) -> SamplingParams:
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(asked, default_max_gen_toks=256))
        until, longest, sample = kwargs.pop("until"), kwargs.pop("max_gen_toks"), kwargs.pop("do_sample", False)
        unknown = sorted(set(kwargs) - set(_SAMPLING))
        if unknown or longest >= self.max_length:
            raise UsageError(
                f"cannot generate with {', '.join(unknown) or f'max_gen_toks {longest}'}",
                where="generation_kwargs",
                how_to_fix=f"known: until, do_sample, max_gen_toks below {self.max_length}, {', '.join(_SAMPLING)}",
            )
        kwargs["temperature"] = kwargs.get("temperature", 1.0) if sample else 0.0
        return SamplingParams(max_tokens=longest, stop=[stop for stop in until if stop], **kwargs)


def run_tasks(
    model: str | Path, tasks: Sequence[str], *, limit: int | None = None, num_fewshot: int | None = None, **options: Any
) -> dict[str, Any]:
    """Evaluate on lm-eval tasks: results as lm-eval writes them, samples left out.

    tasks: names known to lm-eval, our own ("bitwright_endings", "bitwright_sequences", both: "bitwright"), task files,
    or folders of them. limit: items per task. options: of `BitwrightLM`. Raises UsageError for unknown tasks.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    folders = [TASKS, *(Path(task) for task in tasks if Path(task).is_dir())]
    manager = TaskManager(include_path=list(folders), include_defaults=False)
    names: list[str] = []
    for task in tasks:
        if Path(task).is_dir():
            names += TaskManager(include_path=task, include_defaults=False).all_subtasks
        else:
            names.append(task)
    if not all(name in manager.all_tasks or Path(name).is_file() for name in names):
        manager = TaskManager(include_path=list(folders))  # all of lm-eval's own: seconds
    unknown = [name for name in names if name not in manager.all_tasks and not Path(name).is_file()]
    if unknown or not names:
        raise UsageError(
            f"no such task: {', '.join(unknown) or ', '.join(tasks) or '(none)'}",
            how_to_fix="a name from `lm_eval ls tasks`, bitwright_endings, bitwright_sequences, or a folder of tasks",
        )
    results = lm_eval.simple_evaluate(
        model=BitwrightLM(str(model), **options),
        tasks=list(names),
        limit=limit,
        num_fewshot=num_fewshot,
        task_manager=manager,
        log_samples=False,
    )
    assert results is not None, "lm-eval answers None only on other ranks"
    plain: dict[str, Any] = json.loads(json.dumps(results, default=handle_non_serializable))
    return plain


def rows(answers: dict[str, Any]) -> list[tuple[str, ...]]:
    """(task, items, metric, value, standard error) of what `run_tasks` returned, for people."""
    lines: list[tuple[str, ...]] = []
    for task, found in answers["results"].items():
        for key in (key for key in found if "," in key and "_stderr," not in key):
            metric, _, chosen = key.partition(",")
            spread = found.get(f"{metric}_stderr,{chosen}")
            spread = f"{spread:.4f}" if isinstance(spread, float) else ""
            lines.append((task, str(found["sample_len"]), metric, f"{found[key]:.4f}", spread))
    return lines
