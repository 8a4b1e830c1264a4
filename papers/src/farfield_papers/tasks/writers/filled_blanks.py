"""Output of `farfield predict` for masked language models: the likeliest words of every blank, as JSON or CSV."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from farfield_papers.tasks.checkpoints import written
from farfield_papers.tasks.masked_lm import Filled
from farfield_papers.tasks.writers.predictions import PredictionFile, gather_parts

_COLUMNS = ("name", "blank", "rank", "word", "probability")


class FilledTable(PredictionFile):
    """Write the predictions of `MaskedLM` to a file: `.csv` with a row for each likely word, or `.json`.

    In JSON each sample has its `name`, its `text` as it was read, the text with the likeliest words, `filled`, and in
    `blanks` the likely words of each blank with their probabilities. An existing file is replaced.

    Args:
        path: The file; None writes `predictions.json` into the trainer's `default_root_dir`.

    Raises:
        ValueError: If the file name ends in neither `.csv` nor `.json`.
        FileExistsError: Before the first prediction, if the file is one of the inputs.
        CheckpointError: If the file cannot be written.
    """

    default = "predictions.json"

    def __init__(self, path: str | None = None) -> None:
        super().__init__(path)
        if path is not None and Path(path).suffix not in (".csv", ".json"):
            raise ValueError(f"FilledTable: {path} must end in .json or .csv.")

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Gather the samples of all processes and write each once, in the order of the data."""
        tokenizer = trainer.datamodule.tokenizer  # type: ignore[attr-defined]
        samples = {sample["name"]: sample for filled in predictions for sample in list_samples(filled, tokenizer)}
        # Process i of n has samples i, i + n, i + 2n and so on.
        turns = itertools.zip_longest(*(part.values() for part in gather_parts(trainer, samples)))
        samples = {sample["name"]: sample for turn in turns for sample in turn if sample is not None}
        if trainer.is_global_zero:
            place = self.place(trainer)
            text = format_csv(samples.values()) if place.suffix == ".csv" else json.dumps([*samples.values()], indent=1)
            with written(place) as file:
                file.write(text.encode())


def list_samples(filled: Filled, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Yield for each sample of a batch its entry of the JSON file."""
    for name, words, likeliest, probabilities in zip(*filled, strict=True):
        blanks = [
            [
                {"word": tokenizer.convert_ids_to_tokens(int(word)), "probability": round(float(chance), 6)}
                for word, chance in zip(*each, strict=True)
            ]
            for each in zip(likeliest, probabilities, strict=True)
        ]
        whole = words.clone()
        whole[words == tokenizer.mask_token_id] = likeliest[:, 0]
        ends = {tokenizer.cls_token_id, tokenizer.sep_token_id}
        texts = [tokenizer.decode([word for word in each.tolist() if word not in ends]) for each in (words, whole)]
        yield {"name": name, "text": texts[0], "filled": texts[1], "blanks": blanks}


def format_csv(samples: Any) -> str:
    """Return a CSV table with one row for each likely word of each blank."""
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow(_COLUMNS)
    for sample in samples:
        for blank, likely in enumerate(sample["blanks"], 1):
            for rank, each in enumerate(likely, 1):
                table.writerow((sample["name"], blank, rank, each["word"], f"{each['probability']:.6f}"))
    return text.getvalue()
