"""Tokenizers, saved or trained (WordPiece) on the text; and samples of tokens, masked on access."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from farfield._refusals import door
from farfield_papers.data.readers.images import FolderError, list_some, refuse
from farfield_papers.data.readers.text import TextPiece
from farfield_papers.data.sampler import Draw, DrawnSamples

_SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
# Label of ignored tokens, as in transformers and torch.
_IGNORED = -100
# Number of characters, the most frequent ones, of a trained tokenizer; words with other characters become [UNK].
_CHARACTERS = 1000
# Number of pieces that are tokenised at a time.
_MANY = 8192


def train_tokenizer(lines: Iterable[str], vocabulary: int) -> Any:
    """Train BERT's kind of tokenizer, WordPiece in lower case, of at most `vocabulary` words, special ones too."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    def tokenizer_of(words: dict[str, int] | None) -> Any:
        made = Tokenizer(models.WordPiece(words, unk_token=_SPECIAL["unk"]))
        made.normalizer = normalizers.BertNormalizer(lowercase=True)
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
        return made

    lines, tokenizer = list(lines), tokenizer_of(None)
    # The trainer numbers the characters inside words in the order of a hash map, which differs between processes, and
    # breaks ties between equally frequent pairs by these numbers. Passed as special tokens, they have a fixed order.
    counts = Counter(itertools.chain.from_iterable(map(tokenizer.normalizer.normalize_str, lines)))
    ranked = sorted((char for char in counts if not char.isspace()), key=lambda char: (-counts[char], char))
    alphabet = sorted(ranked[:_CHARACTERS])
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocabulary,
        special_tokens=[*_SPECIAL.values(), *(f"##{char}" for char in alphabet)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer = tokenizer_of(tokenizer.get_vocab())
    return build_tokenizer(tokenizer.to_str(), {f"{name}_token": word for name, word in _SPECIAL.items()})


def build_tokenizer(text: str, special: dict[str, str]) -> Any:
    """Build a tokenizer of transformers from the JSON text of `tokenizers`, and its special words."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer.from_str(text)
    first, last = special["cls_token"], special["sep_token"]
    if tokenizer.post_processor is None:
        # It puts the first and the last word around each text.
        from tokenizers.processors import TemplateProcessing

        ends = [(word, tokenizer.token_to_id(word)) for word in (first, last)]
        tokenizer.post_processor = TemplateProcessing(single=f"{first} $A {last}", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@door("load_tokenizer")
def load_tokenizer(folder: Path) -> Any:
    """Load a tokenizer that `save_pretrained` wrote and that has all special words; nothing is downloaded."""
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise FolderError(f"there is no tokenizer folder {folder}; fix: a folder that save_pretrained wrote.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, use_fast=True, trust_remote_code=False)
    # transformers and tokenizers raise all kinds of errors for damaged files, even a plain Exception.
    except Exception as error:
        raise FolderError(
            f"{folder} holds no tokenizer: {error}\n  fix: a folder that a tokenizer's save_pretrained wrote."
        ) from error
    missing = [name for name in _SPECIAL if getattr(tokenizer, f"{name}_token") is None]
    if missing:
        raise FolderError(
            f"the tokenizer in {folder} has no {', '.join(missing)} token, which a masked language model "
            f"needs; fix: the tokenizer of a BERT, RoBERTa or ELECTRA, or none, so that one is trained."
        )
    return tokenizer


def list_special_words(tokenizer: Any) -> dict[str, str]:
    """Return the special words of a tokenizer, by transformers' names for them, such as `mask_token`."""
    return {f"{name}_token": str(getattr(tokenizer, f"{name}_token")) for name in _SPECIAL}


class Batch(NamedTuple):
    """Samples of tokens, padded to the length of the longest."""

    words: Tensor  # `(b, n)`, ids of words, some of them replaced by the mask or by a random word
    mask: Tensor  # `(b, n)`, True where a token is valid
    labels: Tensor  # `(b, n)`, the original words where they are to be predicted, elsewhere -100
    names: list[str]


def collate_tokens(padding: int, samples: Sequence[tuple[Tensor, Tensor, str]]) -> Batch:
    """Return the batch of some samples `(words, labels, name)`, padded to the longest with the id `padding`."""
    words, labels, names = zip(*samples, strict=True)
    lengths = torch.tensor([len(each) for each in words])
    return Batch(
        pad_sequence(list(words), batch_first=True, padding_value=padding),
        torch.arange(int(lengths.max())) < lengths[:, None],
        pad_sequence(list(labels), batch_first=True, padding_value=_IGNORED),
        list(names),
    )


class TokenSamples(Dataset[tuple[Tensor, Tensor, str]]):
    """Spans of a sequence of tokens, `(words, labels, name)`, each between a first and a last word, masked anew."""

    def __init__(
        self, tokens: Tensor, bounds: Sequence[tuple[int, int]], names: Sequence[str], tokenizer: Any, share: float
    ) -> None:
        from transformers import DataCollatorForLanguageModeling

        # All ids, int32; the start and the end of each sample, the end exclusive.
        self.tokens, self.bounds, self.names = tokens, bounds, names
        self.first, self.last = tokenizer.cls_token_id, tokenizer.sep_token_id
        # Of the share that is to be predicted 80 % become the mask, 10 % a random word, and 10 % stay.
        self.masking = DataCollatorForLanguageModeling(
            tokenizer, mlm_probability=share, mask_replace_prob=0.8, random_replace_prob=0.1
        )

    def __len__(self) -> int:
        return len(self.bounds)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, str]:
        start, end = self.bounds[index]
        words = torch.full((1, end - start + 2), self.last)
        words[0, 0], words[0, 1:-1] = self.first, self.tokens[start:end]
        ends = torch.ones_like(words)
        ends[0, 1:-1] = 0
        masked, labels = self.masking.torch_mask_tokens(words, special_tokens_mask=ends)
        return masked[0], labels[0], self.names[index]


def read_fixed(samples: Dataset[Any], index: int) -> Any:
    """Read a sample, masked in the same way each time, so that metrics can be compared."""
    return DrawnSamples(samples)[Draw(index, index)]


@door("read_blanks")
def read_blanks(lines: Sequence[TextPiece], tokenizer: Any, length: int) -> list[tuple[Tensor, Tensor, str]]:
    """Return samples of lines with mask tokens to fill in, of at most `length` tokens; all labels are -100."""
    encoded = tokenizer([piece.text for piece in lines])["input_ids"]
    mask = tokenizer.mask_token_id
    blank = [piece.line for piece, words in zip(lines, encoded, strict=True) if mask not in words]
    if blank:
        raise FolderError(
            f"{lines[0].file} has lines without {tokenizer.mask_token}, in which there is nothing to "
            f"fill: {list_some(blank)}; fix: write {tokenizer.mask_token} where a word is wanted."
        )
    _check_lengths(lines, [len(words) - 2 for words in encoded], length, "or shorter lines")
    samples = [(torch.tensor(words), f"line {piece.line}") for piece, words in zip(lines, encoded, strict=True)]
    return [(words, torch.full_like(words, _IGNORED), name) for words, name in samples]


@door("tokenise")
def tokenise(
    pieces: Iterator[TextPiece], tokenizer: Any, *, length: int, unit: str, too_long: str
) -> tuple[Tensor, list[tuple[int, int]], list[str]]:
    """Return the ids of all tokens, and start, end and name of each sample of at most `length`, both ends included."""
    room, tokens = length - 2, array("i")
    bounds: list[tuple[int, int]] = []
    names: list[str] = []
    stretches: list[tuple[TextPiece, int, int]] = []
    while some := list(itertools.islice(pieces, _MANY)):
        encodings = tokenizer.backend_tokenizer.encode_batch([piece.text for piece in some], add_special_tokens=False)
        if unit != "blocks" and too_long == "refuse":
            _check_lengths(some, [len(encoding.ids) for encoding in encodings], length)
        for piece, encoding in zip(some, encodings, strict=True):
            if not encoding.ids:
                continue
            start, end = len(tokens), len(tokens) + len(encoding.ids)
            tokens.extend(encoding.ids)
            # Blocks go across the pieces of a file.
            if unit == "blocks" and stretches and stretches[-1][0].file == piece.file:
                first, begin, _ = stretches[-1]
                stretches[-1] = (first, begin, end)
            else:
                stretches.append((piece, start, end))
    for piece, start, end in stretches:
        for place in range(start, end, room):
            bounds.append((place, min(place + room, end)))
            part = f" + {place - start} tokens" if place > start else ""
            names.append(f"{piece.file}: line {piece.line}{part}")
    return torch.from_numpy(np.array(tokens, np.int32)), bounds, names


def _check_lengths(
    pieces: Sequence[TextPiece], lengths: Sequence[int], length: int, otherwise: str = "or too_long=split"
) -> None:
    # Lengths do not count the first and the last word.
    longer = [(piece, number + 2) for piece, number in zip(pieces, lengths, strict=True) if number + 2 > length]
    shown = [f"{piece.file}: line {piece.line:,}: {number:,} tokens" for piece, number in longer]
    fix = f"a larger length, as far as the network has positions, {otherwise}."
    refuse(f"texts are longer than length={length} tokens", shown, fix)
