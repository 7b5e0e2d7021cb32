"""How far a candidate's next-token distributions are from the reference's, and the reference's logits kept on disk."""

import hashlib
import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from runtime.evaluate.perplexity import Window, log_probabilities, standard_error
from runtime.evaluate.scorers import Scorer

ROWS = 64  # distributions compared at once: bounds the temporaries at a few vocabularies times this


class ReferenceLogits:
    """The reference's log-probabilities at every scored position, 16 bits each, in two files of a folder.

    codes.bin  uint16 [positions, vocab], raw: log p = low + step * code, then normalised again
    rows.npy   float32 [positions, 2]: low, step

    A row spans 20 to 40 nats, so a step is below 0.001 nats. After normalising, the error this leaves in a divergence
    is under 1e-6 nats where two models agree, and under a ten-thousandth of it where they do not.
    """

    def __init__(self, folder: Path) -> None:
        self.codes = folder / "codes.bin"
        self.rows = torch.from_numpy(np.load(folder / "rows.npy"))
        self.nbytes = self.codes.stat().st_size
        self.vocab = self.nbytes // 2 // len(self.rows)

    def log_probabilities(self, start: int, stop: int) -> Tensor:
        """float32 [stop - start, vocab]. Read, not mapped: mapped pages would count as this process's memory."""
        count, offset = (stop - start) * self.vocab, 2 * start * self.vocab
        codes = torch.from_numpy(np.fromfile(self.codes, np.uint16, count, offset=offset).astype(np.float32))
        low, step = self.rows[start:stop].split(1, dim=1)
        return torch.log_softmax(low + step * codes.view(-1, self.vocab), dim=-1)


def store_reference(scorer: Scorer, windows: Iterable[Window], folder: Path) -> None:
    """Run the reference over all windows and leave its logits in `folder`, which appears complete or not at all."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    rows = []
    with (partial / "codes.bin").open("wb") as file:
        for window in windows:
            log_p = log_probabilities(scorer.logits(window.ids, window.scored + 1)[:-1]).cpu()
            low, high = log_p.amin(1, keepdim=True), log_p.amax(1, keepdim=True)
            step = ((high - low) / 65535).clamp(min=1e-12)
            file.write(((log_p - low) / step).round_().numpy().astype(np.uint16).tobytes())
            rows.append(torch.cat([low, step], dim=1))
    np.save(partial / "rows.npy", torch.cat(rows).numpy())
    partial.replace(folder)


def reference_key(model: Path, windows: Iterable[Window], engine: str) -> str:
    """Names a cache entry: the model's files (names, sizes, times of change), the tokens, and who computed."""
    files = sorted(p for p in model.iterdir() if p.is_file()) if model.is_dir() else [model]
    stamps = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    said = json.dumps([str(model.resolve()), stamps, engine, [[w.ids, w.scored] for w in windows]])
    return hashlib.sha256(said.encode()).hexdigest()[:24]


class Divergence:
    """Per-token differences of a candidate from the reference, collected window by window."""

    def __init__(self, reference: ReferenceLogits) -> None:
        self.reference, self.at = reference, 0
        self._parts: list[Tensor] = []

    def add(self, log_q: Tensor, targets: Tensor) -> None:
        """log_q: the candidate's log-probabilities at the next positions, float32 [n, vocab]; targets int64 [n]."""
        for log_rows, wanted in zip(log_q.split(ROWS), targets.split(ROWS), strict=True):
            log_p = self.reference.log_probabilities(self.at, self.at + len(wanted))
            p_true, q_true = (x.gather(1, wanted[:, None])[:, 0] for x in (log_p, log_rows))
            kld = (log_p.exp() * (log_p - log_rows)).sum(1).clamp(min=0)
            same = (log_p.argmax(1) == log_rows.argmax(1)).float()
            self._parts.append(torch.stack([kld, same, q_true.exp() - p_true.exp(), -p_true, p_true - q_true]))
            self.at += len(wanted)

    def summary(self) -> dict[str, float]:
        """Nats for the divergences, fractions for the rest.

        top1: both models' most likely tokens agree; rms_dp: root mean square of the shift in the true token's
        probability; ppl_ratio: perplexity over the reference's, its standard error from the paired differences.
        """
        kld, same, shift, ref_nll, excess = torch.cat(self._parts, dim=1).double()
        ratio = math.exp(excess.mean())
        return {
            "kld": float(kld.mean()),
            "kld_stderr": standard_error(kld),
            "kld_median": float(kld.median()),
            "kld_p99": float(kld.quantile(0.99)),
            "kld_max": float(kld.max()),
            "top1": float(same.mean()),
            "top1_stderr": standard_error(same),
            "rms_dp": float(shift.square().mean().sqrt()),
            "ref_ppl": math.exp(ref_nll.mean()),
            "ppl_ratio": ratio,
            "ppl_ratio_stderr": ratio * standard_error(excess),
        }
