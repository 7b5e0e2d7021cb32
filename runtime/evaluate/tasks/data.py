"""Loads the items beside this file, without a network or a cache; named by the task files."""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict


def endings(**_: Any) -> DatasetDict:
    return _items("endings.jsonl")


def sequences(**_: Any) -> DatasetDict:
    return _items("sequences.jsonl")


def _items(name: str) -> DatasetDict:
    lines = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
    return DatasetDict({"test": Dataset.from_list([json.loads(line) for line in lines])})
