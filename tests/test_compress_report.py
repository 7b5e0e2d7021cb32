"""The output directory: whole or not at all; the card, the manifest and the log in it."""

import errno
import json

import pytest
import torch
import yaml
from safetensors import SafetensorError

from calib.text import CalibrationSet
from compress.plan import make_plan
from compress.recipe import Recipe
from compress.recipe_file import load_recipe
from compress.report import LayerLog, OutputDirectory, write_report
from formats.containers import open_checkpoint
from formats.errors import DataError, ResourceError, UsageError
from formats.integrity import sha256, verify


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def finish(out, content="new", **options):
    directory = OutputDirectory(out, **options)
    with directory as folder:
        (folder / "weights").write_text(content)
        directory.commit()


def test_the_output_appears_at_the_end(tmp_path):
    out = tmp_path / "deep" / "päth with spaces"
    directory = OutputDirectory(out)
    with directory as folder:
        assert folder.parent == out.parent and folder.name.endswith(".partial")
        (folder / "weights").write_text("x")
        assert not out.exists()
        directory.commit()
    assert tree(out.parent) == [out.name, f"{out.name}/weights"]


def test_an_existing_output_is_refused(tmp_path):
    finish(tmp_path / "out")
    for options in ({}, {"resume": True}):
        with pytest.raises(UsageError, match="exists already"):
            OutputDirectory(tmp_path / "out", **options)


def test_overwriting_replaces_at_the_very_end(tmp_path):
    out = tmp_path / "out"
    finish(out, "old")
    directory = OutputDirectory(out, overwrite=True)
    with directory as folder:
        (folder / "weights").write_text("new")
        assert (out / "weights").read_text() == "old"
        directory.commit()
    assert (out / "weights").read_text() == "new"
    assert tree(tmp_path) == ["out", "out/weights"]


def test_a_file_in_the_way_is_overwritten_too(tmp_path):
    (tmp_path / "out").write_text("a file")
    finish(tmp_path / "out", overwrite=True)
    assert tree(tmp_path) == ["out", "out/weights"]


FULL = OSError(errno.ENOSPC, "No space left on device")
FULL_TOO = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("error", [DataError("no"), FULL, FULL_TOO])
def test_errors_leave_the_previous_state(tmp_path, error):
    out = tmp_path / "out"
    finish(out, "old")
    with pytest.raises((DataError, ResourceError)), OutputDirectory(out, overwrite=True) as folder:
        (folder / "weights").write_text("half")
        raise error
    assert tree(tmp_path) == ["out", "out/weights"] and (out / "weights").read_text() == "old"


def test_a_full_disk_says_how_much_is_needed(tmp_path):
    directory = OutputDirectory(tmp_path / "out", needed=90_000_000)
    with pytest.raises(ResourceError, match="the output needs 90 MB") as caught, directory:
        raise FULL
    assert caught.value.exit_code == 4 and tree(tmp_path) == []


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), ZeroDivisionError()])
def test_an_interruption_can_be_resumed(tmp_path, stop):
    out = tmp_path / "out"
    with pytest.raises(type(stop)), OutputDirectory(out) as folder:
        (folder / "part").write_text("done")
        raise stop
    with pytest.raises(UsageError, match="--resume"):
        OutputDirectory(out)
    with pytest.raises(UsageError, match="changed"), OutputDirectory(out, resume=True):
        raise UsageError("changed")  # refusing to resume keeps what is there
    directory = OutputDirectory(out, resume=True, overwrite=True)  # together: replace OUT by what is resumed
    with directory as folder:
        assert (folder / "part").read_text() == "done"
        directory.commit()
    assert tree(out) == ["part"]


def test_overwrite_drops_an_interrupted_run(tmp_path):
    with pytest.raises(KeyboardInterrupt), OutputDirectory(tmp_path / "out") as folder:
        (folder / "part").write_text("done")
        raise KeyboardInterrupt
    finish(tmp_path / "out", overwrite=True)
    assert tree(tmp_path) == ["out", "out/weights"]


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path):
    finish(tmp_path / "out", "old")
    (tmp_path / "out").rename(tmp_path / "out.old")
    with pytest.raises(UsageError, match="exists already"):
        OutputDirectory(tmp_path / "out")
    assert (tmp_path / "out" / "weights").read_text() == "old"


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ResourceError, match="cannot write here"), OutputDirectory(tmp_path / "file" / "out"):
        pass


def test_the_log_survives_a_torn_line(tmp_path):
    log = LayerLog(tmp_path)
    log.write("a", "q4_k", 0.01, 0.02, 0.1, 1.23456, bits=4)
    log.write("b", "q4_k", 0.02, 0.03, None, 2)
    assert log.records[0] == {
        "name": "a",
        "grid": "q4_k",
        "error": 0.01,
        "rtn_error": 0.02,
        "damp": 0.1,
        "bits": 4,
        "seconds": 1.235,
    }
    text = log.path.read_text()
    log.path.write_text(text[:-9])
    again = LayerLog(tmp_path)
    assert again.records == log.records[:1]
    again.write("b", "q4_k", 0.02, 0.03, None, 2)
    assert log.path.read_text() == text


def test_the_report(tiny_model, tmp_path):
    recipe = Recipe.model_validate(
        {
            "version": 1,
            "model": "someone/tiny",
            "steps": [{"algorithm": "gptq", "grid": "int4-g32"}],
            "overrides": [{"match": "nothing", "bits": 3}],
            "output": {"format": "gptq"},
        }
    )
    command = "quantize run r.yaml 'my model' -o out"
    text = CalibrationSet(torch.zeros(3, 8, dtype=torch.int64), "calib.txt", "ab12", 5, 24)
    found = {"ppl": 21.5, "ppl_stderr": 0.5, "tokens": 99, "kld": 0.0123, "kld_stderr": 0.001, "ref_ppl": 20.0}
    found |= {"top1": 0.9, "top1_stderr": 0.01}
    layers = [{"name": f"layer-{i}", "grid": "int4-g32", "error": i / 100, "rtn_error": 0.5} for i in range(9)]
    with open_checkpoint(tiny_model()) as checkpoint:
        plan = make_plan(recipe, checkpoint)
        (tmp_path / "model.bin").write_bytes(b"weights")
        write_report(
            tmp_path, plan, checkpoint, command=command, calibration=text, evaluation=found, layers=layers, notes=["N!"]
        )
        source = checkpoint.path
    assert verify(tmp_path) == []
    assert load_recipe(str(tmp_path / "recipe.yaml")) == recipe
    assert json.loads((tmp_path / "eval.json").read_text()) == found

    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["command"] == command and manifest["seed"] == 0
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["source"]["model.safetensors"] == sha256(source / "model.safetensors")
    assert manifest["calibration"]["sha256"] == "ab12" and manifest["calibration"]["samples"] == 3
    assert manifest["hashes"]["files"]["model.bin"]["sha256"] == sha256(tmp_path / "model.bin")

    card = (tmp_path / "README.md").read_text()
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front)["base_model"] == "someone/tiny"
    assert yaml.safe_load(front)["tags"] == ["quantized", "bitwright", "gptq"]
    assert f"```sh\n{command}\n```" in body
    assert "3 x 8 tokens" in body and "asked for 128 samples" in body
    assert "| perplexity | 21.50 ± 0.50 |" in body and "0.0123 ± 0.0010" in body
    assert "| 90.0 ± 1.0 |" in body and "`layer-8`" in body and "`layer-3`" not in body
    assert "- N!" in body and 'override "nothing" changes nothing' in body
    assert "| `model.layers.*.mlp.up_proj.weight` | 2 | int4-g32 |" in body
    assert "\n\n\n" not in card


def test_a_report_without_text_or_evaluation(tiny_model, tmp_path):
    step = {"algorithm": "rtn", "grid": "q4_0"}
    recipe = Recipe.model_validate({"version": 1, "steps": [step], "output": {"format": "gguf"}})
    with open_checkpoint(tiny_model()) as checkpoint:
        plan = make_plan(recipe, checkpoint)
        write_report(tmp_path, plan, checkpoint, command="c", calibration=None, evaluation=None)
    card = (tmp_path / "README.md").read_text()
    assert "No calibration text was used." in card and "Not measured" in card and "llama-cli" in card
    assert not (tmp_path / "eval.json").exists()
