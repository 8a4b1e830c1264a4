"""Text for masked language models: plain text files from a folder, as tokens, some of them masked."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import Dataset

from farfield._checks import install_papers
from farfield._refusals import put_name
from farfield_papers.data.base import Loading, name_module
from farfield_papers.data.readers.images import FolderError
from farfield_papers.data.readers.text import Text, read_parts, read_text_file
from farfield_papers.data.tokenizer import (
    TokenSamples,
    build_tokenizer,
    collate_tokens,
    list_special_words,
    load_tokenizer,
    read_blanks,
    read_fixed,
    tokenise,
    train_tokenizer,
)

Unit = Literal["blocks", "documents", "lines"]
# Fewest characters of a training text without a warning; tiny Shakespeare has a million.
_SMALL = 100_000


class TextFolder(Loading):
    """Read text files, UTF-8, from a folder: `train/*.txt` and `val/*.txt`, or any `.txt` files below it.

    Folders `train` and `val` (and optionally `test`) are the splits; without them, the last `val_share` of every file
    is held out of training, for both `validate` and `test`. The tokenizer is a saved one, or WordPiece trained on the
    training text: nothing is downloaded. A checkpoint contains it, so that `test` and `predict` use the tokenizer of
    `fit`. All tokens are held in memory, four bytes each.

    A batch is `Batch(words, mask, labels, names)`. Training tokens are masked anew in every epoch; validation and test
    tokens are always masked in the same way.

    Args:
        root: The folder. It is not read, and may be left out, where `predict` is given and predicted from a checkpoint.
        tokenizer: A folder that a tokenizer's `save_pretrained` wrote; None trains one.
        vocabulary: Largest number of words of a tokenizer that is trained.
        length: Largest number of tokens of a sample, first and last word included; at most the network's positions.
        unit: What a sample is: `"blocks"` of that length, across lines, of which only a file's last has padding;
            `"lines"`; or `"documents"`, which blank lines separate.
        too_long: What happens to a line or document that is longer: `"split"` or `"refuse"`.
        share: Share of the tokens that are to be predicted, most of them masked.
        val_share: Share of the text of each file that is held out of training, if there are no folders.
        batch_size: Samples per batch, on each device.
        predict: A file of lines with `[MASK]` for the words to predict; None predicts the test samples.

    Raises:
        FolderError: If neither `root` nor `predict` is given, or a number is out of range. In `setup` or when a loader
            is built: no folder, no text in it, a file that is not UTF-8 (with the byte), a line that is too long, a
            tokenizer that has no mask; the error names the files.
        ImportError: If transformers is not installed.
    """

    def __init__(
        self,
        root: str | None = None,
        *,
        tokenizer: str | None = None,
        vocabulary: int = 8192,
        length: int = 128,
        unit: Unit = "blocks",
        too_long: Literal["split", "refuse"] = "split",
        share: float = 0.15,
        val_share: float = 0.05,
        batch_size: int = 32,
        predict: str | None = None,
    ) -> None:
        # Masking is cheap: loader processes would cost more than they save.
        super().__init__(batch_size, workers=0)
        self._set_folders(root, predict, "a folder of text files", "a file of lines")
        if length < 3:
            error = FolderError(f"length must be 3 at least, a token between two special ones, got {length}.")
            raise put_name("TextFolder", error)
        for name, value in (("share", share), ("val_share", val_share)):
            if not isinstance(value, int | float) or not 0 < value < 1:
                raise put_name("TextFolder", FolderError(f"{name} must lie between 0 and 1, got {value!r}."))
        self.saved, self.vocabulary = None if tokenizer is None else Path(tokenizer), vocabulary
        self.length, self.share, self.val_share = length, share, val_share
        self.options: dict[str, Any] = {"length": length, "unit": unit, "too_long": too_long}
        self.texts: dict[str, list[Text]] = {}
        # Samples are made on first access, after a checkpoint has been read, which may contain the tokenizer.
        self.parts = _LazyDatasets(self.samples)
        self._tokenizer: Any = None

    def setup(self, stage: str) -> None:
        """Read the files of all splits, or the file to predict."""
        if importlib.util.find_spec("transformers") is None:
            raise ImportError(f"TextFolder: it needs transformers; fix: {install_papers('text')}")
        super().setup(stage)

    def _list_predict(self, path: Path) -> None:
        self.texts["predict"] = [read_text_file(path)]
        if not any(True for _ in self.texts["predict"][0].pieces("lines")):
            raise FolderError(f"{path} has no lines; fix: lines of text with [MASK] for each word to predict.")

    def _list_root(self, stage: str) -> None:
        if self.root is None:
            raise FolderError(f"{stage} needs root, a folder of text files; fix: --data.root.")
        self._read()
        characters = sum(len(line) for text in self.texts["train"] for line in text.lines)
        if stage == "fit" and characters < _SMALL:
            rank_zero_warn(
                f"TextFolder: {self.root} has {characters:,} characters to train on, which a network learns by heart; "
                f"fix: {_SMALL:,} or more, or saved weights to start from, --model.network.weights."
            )
        if stage == "test" and "test" not in self.texts:
            rank_zero_info(f"TextFolder: {self.root} has no folder test: using val.")
        self.texts.setdefault("test", self.texts["val"])
        self.texts.setdefault("predict", self.texts["test"])

    def inputs(self) -> list[Path]:
        """Return the input files of `predict`, which must not be overwritten."""
        return [text.file for text in self.texts.get("predict", [])]

    def _read(self) -> None:
        if self.root is not None and "train" not in self.texts:
            self.texts |= read_parts(self.root, self.val_share)

    @property
    @name_module("TextFolder")
    def tokenizer(self) -> Any:
        """The tokenizer: that of a checkpoint, else the saved one, else one that is trained on the training text."""
        if self._tokenizer is None and self.saved is not None:
            self._tokenizer = load_tokenizer(self.saved)
        if self._tokenizer is None:
            self._read()
            if "train" not in self.texts:
                raise FolderError(
                    "without a checkpoint there is no tokenizer; fix: --ckpt_path, --data.tokenizer or --data.root."
                )
            pieces = (piece.text for text in self.texts["train"] for piece in text.pieces("lines"))
            self._tokenizer = train_tokenizer(pieces, self.vocabulary)
            rank_zero_info(f"TextFolder: trained a tokenizer of {len(self._tokenizer):,} words.")
        return self._tokenizer

    def state_dict(self) -> dict[str, Any]:
        """Return the data entries of a checkpoint: those of `Loading`, the tokenizer and its special words."""
        text = self.tokenizer.backend_tokenizer.to_str()
        return super().state_dict() | {"tokenizer": text, "special": list_special_words(self.tokenizer)}

    @name_module("TextFolder")
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the seed and the tokenizer of a checkpoint; a given `tokenizer` must have the same words."""
        super().load_state_dict(state_dict)
        try:
            kept = build_tokenizer(state_dict["tokenizer"], state_dict["special"])
        # tokenizers raises a plain Exception.
        except Exception as error:
            raise FolderError(f"the checkpoint's tokenizer is damaged: {error!r}; fix: train anew.") from error
        given = None if self.saved is None else load_tokenizer(self.saved)
        if given is not None and given.get_vocab() != kept.get_vocab():
            raise FolderError(
                f"the tokenizer in {self.saved} has other words than the checkpoint's, {len(given):,} and "
                f"{len(kept):,}; fix: leave tokenizer out, the checkpoint has its own."
            )
        self._tokenizer = kept

    @name_module("TextFolder")
    def samples(self, part: str) -> Dataset[Any]:
        """Tokenise a part of the text, and return its samples."""
        if part == "predict" and self.predict is not None:
            blanks: Any = read_blanks(list(self.texts[part][0].pieces("lines")), self.tokenizer, self.length)
            return blanks
        pieces = (piece for text in self.texts[part] for piece in text.pieces(self.options["unit"]))
        samples = TokenSamples(*tokenise(pieces, self.tokenizer, **self.options), self.tokenizer, self.share)
        if not len(samples):
            raise FolderError(
                f"the {part} part of {self.root} has no token of the tokenizer; fix: other text, or another tokenizer."
            )
        return samples if part == "train" else self._listed(range(len(samples)), partial(read_fixed, samples))

    def _loader(self, samples: Dataset[Any], **options: Any) -> Any:
        return super()._loader(samples, collate_fn=partial(collate_tokens, self.tokenizer.pad_token_id), **options)


class _LazyDatasets(dict[str, Dataset[Any]]):
    """Name of a part -> its dataset, which `make` builds from the name on first access."""

    def __init__(self, make: Callable[[str], Dataset[Any]]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, name: str) -> Dataset[Any]:
        self[name] = self.make(name)
        return self[name]
