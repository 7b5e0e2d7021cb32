"""lm-eval through our engine gives the numbers of lm-eval's own "hf" backend, on our tasks and on a local one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from formats.errors import UsageError

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance  # noqa: E402

from runtime.evaluate.harness import TASKS, BitwrightLM, run_tasks  # noqa: E402

LOCAL = """\
task: local_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: byte_perplexity}}, {{metric: word_perplexity}}]
"""


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=args, idx=i) for i, args in enumerate(arguments)]


def hf_model(model: Path, **options: Any) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(model), dtype="float32", device="cpu", batch_size=4, **options)


def test_each_kind_of_request_equals_hf(model: Path) -> None:
    ours, theirs = BitwrightLM(str(model), kernel="reference", max_length=60), hf_model(model, max_length=60)
    pairs = [
        ("The dog", " runs"),
        ("The dog", " sleeps all day"),
        ("", "Once upon"),
        ("A trailing space ", "moves"),
        ("a long context that must lose its front " * 4, " end"),
    ]
    scored = ours.loglikelihood(requests("loglikelihood", pairs))
    expected = theirs.loglikelihood(requests("loglikelihood", pairs))
    assert [s[0] for s in scored] == pytest.approx([e[0] for e in expected], abs=1e-3)
    assert [s[1] for s in scored] == [e[1] for e in expected]
    texts = [("Short.",), ("A text longer than one window of sixty tokens, " * 5,)]
    rolling = ours.loglikelihood_rolling(requests("loglikelihood_rolling", texts))
    assert rolling == pytest.approx(theirs.loglikelihood_rolling(requests("loglikelihood_rolling", texts)), abs=1e-2)
    wanted = [
        ("The quick brown", {"until": [" "], "max_gen_toks": 6}),
        ("In 1969", {"until": ["e", "o"], "max_gen_toks": 12, "do_sample": False}),
        ("def mean(", {"max_gen_toks": 5}),
    ]
    assert ours.generate_until(requests("generate_until", wanted)) == theirs.generate_until(
        requests("generate_until", wanted)
    )


def test_tasks_give_the_numbers_of_hf(model: Path, tmp_path: Path) -> None:
    from lm_eval.tasks import TaskManager

    folder = tmp_path / "my tasks"
    folder.mkdir()
    (folder / "items.jsonl").write_text("".join(json.dumps({"text": f"The moon is {n}."}) + "\n" for n in range(3)))
    (folder / "local.yaml").write_text(LOCAL.format(data=json.dumps(str(folder / "items.jsonl"))))
    ours = run_tasks(model, ["bitwright", str(folder)], kernel="reference", limit=12)
    theirs = lm_eval.simple_evaluate(
        model=hf_model(model),
        tasks=["bitwright", "local_text"],
        limit=12,
        task_manager=TaskManager(include_path=[TASKS, folder], include_defaults=False),
        log_samples=False,
    )
    assert set(ours["results"]) == {"bitwright_endings", "bitwright_sequences", "local_text"}
    for task, metrics in theirs["results"].items():
        for name, value in metrics.items():
            found = ours["results"][task][name]
            assert found == (pytest.approx(value, rel=1e-3) if isinstance(value, float) else value), (task, name)
    assert {"results", "configs", "versions", "n-shot", "config", "n-samples"} <= set(ours)
    json.dumps(ours["results"])


def test_mistakes_are_named(model: Path) -> None:
    with pytest.raises(UsageError, match="no such task"):
        run_tasks(model, ["bitwright_typo"])
    lm = BitwrightLM(str(model), kernel="reference")
    with pytest.raises(UsageError, match="num_beams"):
        lm.generate_until(requests("generate_until", [("a", {"num_beams": 3, "max_gen_toks": 4})]))
    with pytest.raises(UsageError, match="max_gen_toks"):
        lm.generate_until(requests("generate_until", [("a", {"max_gen_toks": 4000})]))


def test_items_are_sound() -> None:
    for name, keys in (("endings", {"text", "endings", "right"}), ("sequences", {"text", "next"})):
        items = [json.loads(line) for line in (TASKS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        assert len(items) >= 20 and all(set(item) == keys for item in items)
        assert len({item["text"] for item in items}) == len(items)
