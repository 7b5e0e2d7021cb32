"""The matrix container x family x reader: files of ours, read by programs we did not write.

    python tests/peers/matrix.py PEERS_DIRECTORY [--families llama,gpt2]

PEERS_DIRECTORY holds the environments that install.sh makes. Prints a Markdown table: for each directory the largest
absolute difference between the reader's float32 logits and those of our dequantised weights in transformers, or, for
gguf-py, of the decoded values. Exits with 1 when
a cell is wrong; "not run" where a reader is not installed.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from conftest import tiny_config, tiny_tokenizer  # noqa: E402
from llama_engine import ask  # noqa: E402
from quantised import decoded, logits, write_quantised  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from formats.containers import open_checkpoint  # noqa: E402
from formats.qtensor import QTensor  # noqa: E402

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt2", "mixtral", "qwen3_moe")
MOE = ("mixtral", "qwen3_moe")
LIMIT = 1e-3
GGUF_GRIDS = ["q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4"]
PROMPT = (torch.arange(3, 51) * 7 % 384).tolist()  # from 32 tokens on, llama.cpp's BLAS keeps activations in float32


def mixture(symmetric: str) -> Callable[[str], str | None]:
    """8 bits in one place, floats in another, 4 bits elsewhere."""

    def choose(name: str) -> str | None:
        if ".0.mlp.down_proj" in name or ".0.mlp.c_fc" in name:
            return None
        return f"int8-channel{symmetric}" if ".1.self_attn" in name or ".1.attn" in name else f"int4-g32{symmetric}"

    return choose


def gguf_mixture(name: str) -> str:
    return "q8_0" if "v_proj" in name else "q4_0"


@dataclass
class Case:
    container: str
    label: str
    choose: Any
    options: dict[str, Any]
    reader: str


def cases(family: str) -> Iterator[Case]:
    yield Case("gptq", "4-bit g32 sym, v1", "int4-g32-sym", {}, "gptqmodel")
    yield Case("gptq", "mixed 4/8, act_order, v2", mixture(""), {"act_order": True}, "gptqmodel")
    if family == "llama":
        for spec in ("int2-g16", "int3-g32", "int4-g128", "int8-channel-sym"):
            yield Case("gptq", spec, spec, {}, "gptqmodel")
    yield Case("awq", "4-bit g32", "int4-g32", {}, "gptqmodel")
    if family != "gpt2":
        yield Case("compressed-tensors", "mixed 4/8 sym", mixture("-sym"), {}, "transformers")
        if family not in MOE:
            yield Case("compressed-tensors", "4-bit g32 asym", "int4-g32", {}, "transformers, dequantize=True")
    if family not in MOE:
        yield Case("bitsandbytes", "nf4", "nf4", {}, "bitsandbytes")
    yield Case("gguf", "float32", lambda n: None, {}, "llama.cpp")
    attention = "q4_0/q8_0, experts float32"
    for reader in ("gguf-py", "llama.cpp", "ik_llama.cpp"):
        if reader == "llama.cpp" and family in MOE:  # its product with experts rounds activations
            yield Case("gguf", attention, lambda n: None if ".experts." in n else gguf_mixture(n), {}, reader)
        else:
            yield Case("gguf", "q4_0/q8_0", gguf_mixture, {}, reader)
    if family == "llama":
        for spec in GGUF_GRIDS:
            yield Case("gguf", spec, spec, {"hidden": 256}, "llama.cpp")


def make_source(family: str, out: Path, hidden: int = 192) -> Path:
    """A random model; 192 wide, its rows are not whole groups of 128."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, hidden, 2, 384), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
        elif "embed" not in name:
            parameter.data *= 2
    model.save_pretrained(out)
    tiny_tokenizer.__wrapped__().save_pretrained(out)  # the fixture's own function
    return out


def runtime_names(directory: Path, out: Path) -> Path:
    """Mixtral's experts under the names of transformers 5, the only ones gptqmodel looks for. (vLLM wants the
    checkpoint's own names, which is what we write.)"""
    names = {"block_sparse_moe": "mlp", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}

    def renamed(text: str) -> str:
        for old, new in names.items():
            text = text.replace(old, new)
        return text

    out.mkdir()
    for file in directory.iterdir():
        (out / file.name).symlink_to(file)
    (out / "model.safetensors").unlink()
    (out / "config.json").unlink()
    tensors = load_file(directory / "model.safetensors")
    save_file({renamed(n): t for n, t in tensors.items()}, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(renamed((directory / "config.json").read_text()))
    return out


@torch.no_grad()
def in_transformers(directory: Path, dequantize: bool) -> torch.Tensor:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if dequantize else {}
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options).eval()
    for parameter in model.parameters():
        if parameter.dtype == torch.float16:
            parameter.data = parameter.data.float()
    tokens = torch.arange(3, 51).reshape(2, 24) * 7 % model.config.vocab_size
    result: torch.Tensor = model(tokens).logits
    return result


def in_peer(peers: Path, directories: list[Path], work: Path) -> dict[str, Any]:
    """Logits, or an error message, of each directory."""
    python = peers / "gptqmodel" / "bin" / "python"
    if not python.exists() or not directories:
        return {}
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "GPTQMODEL_CPU_WORKERS": "2"}
    out = work / "logits.npz"
    command = [str(python), str(HERE / "logits.py"), str(out), *map(str, directories)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return dict(np.load(out))


def gguf_py(file: Path) -> str:
    """The largest difference between the quantised values as gguf-py and as we decode them (in no particular order:
    GGUF stacks experts and permutes rows)."""
    import gguf

    floats = ("F32", "F16", "BF16")
    found = [t for t in gguf.GGUFReader(file).tensors if t.tensor_type.name not in floats]
    theirs = np.sort(np.concatenate([gguf.quants.dequantize(t.data, t.tensor_type).ravel() for t in found]))
    with open_checkpoint(file) as model:
        values = [model.read(name) for name in model.names()]
    ours = np.sort(np.concatenate([q.dequantize().numpy().ravel() for q in values if isinstance(q, QTensor)]))
    return f"{np.abs(ours - theirs).max():.1e}" if ours.shape == theirs.shape else "other tensors"


def llama_cpp(file: Path, python: Path | str | None, decoded_weights: Path, work: Path) -> str:
    """The largest difference of the logits of a prompt."""
    from transformers import AutoModelForCausalLM

    if python is None:
        return "not run"
    model = AutoModelForCausalLM.from_pretrained(decoded_weights, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0].numpy()
    try:
        found = ask(file, work / "llama.npz", python, rows=[PROMPT])["logits-0"]
    except RuntimeError as error:
        return "does not load" if "does not load" in str(error) else str(error).partition(":")[0]
    return f"{np.abs(found - expected).max():.1e}"


def llama_pythons(peers: Path) -> dict[str, Path | str | None]:
    mainline = peers / "llamacpp" / "bin" / "python"
    ik = importlib.util.find_spec("ik_llama_cpp") is not None
    return {"llama.cpp": mainline if mainline.exists() else None, "ik_llama.cpp": sys.executable if ik else None}


def run(peers: Path, families: tuple[str, ...]) -> list[tuple[str, str, str, str, str]]:
    """Rows (container, variant, family, reader, result)."""
    rows: list[tuple[str, str, str, str, str]] = []
    pending: dict[str, tuple[int, torch.Tensor]] = {}
    directories: list[Path] = []
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        for family in families:
            sources = {width: make_source(family, work / f"{family}-{width}", width) for width in (192, 256)}
            for i, case in enumerate(cases(family)):
                out = work / f"{family}-{i}"
                options = dict(case.options)
                with open_checkpoint(sources[options.pop("hidden", 192)]) as model:
                    write_quantised(model, out, case.container, case.choose, **options)
                result = "not run"
                if case.container == "gguf":
                    file = next(out.glob("*.gguf"))
                    weights = decoded(out, work / f"{out.name}-decoded")
                    python = llama_pythons(peers).get(case.reader)
                    result = gguf_py(file) if case.reader == "gguf-py" else llama_cpp(file, python, weights, work)
                else:
                    rounded = "" if "dequantize" in case.reader else ".experts." if "transf" in case.reader else None
                    reference = logits(decoded(out, work / f"{out.name}-decoded", rounded))
                    if "transformers" in case.reader:
                        loaded = in_transformers(out, "dequantize" in case.reader)
                        result = f"{(loaded - reference).abs().max():.1e}"
                    else:
                        if family == "mixtral":
                            out = runtime_names(out, work / f"{out.name}-renamed")
                        directories.append(out)
                        pending[out.name] = len(rows), reference
                rows.append((case.container, case.label, family, case.reader, result))
        for name, found in in_peer(peers, directories, work).items():
            at, reference = pending[name]
            error = found.dtype.kind == "U"
            result = str(found) if error else f"{np.abs(found - reference.numpy()).max():.1e}"
            rows[at] = (*rows[at][:4], result)
    return rows


def is_right(reader: str, result: str) -> bool:
    """ik_llama.cpp is shown, not judged: it rounds activations, which lets routers of random experts tip over."""
    try:
        return reader == "ik_llama.cpp" or float(result) < LIMIT
    except ValueError:
        return reader == "ik_llama.cpp" or result == "not run"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("peers", type=Path)
    parser.add_argument("--families", default=",".join(FAMILIES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = run(args.peers, tuple(args.families.split(",")))
    print("| container | variant | family | reader | max abs difference |\n|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    sys.exit(not all(is_right(*row[3:]) for row in rows))


if __name__ == "__main__":
    main()
