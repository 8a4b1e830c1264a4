"""TextFolder: every file is read or refused by name, samples are the text, words are hidden as BERT hides them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from farfield_papers.data.masked_lm import TextFolder
from farfield_papers.data.readers.images import FolderError
from farfield_papers.data.readers.text import Text
from farfield_papers.data.tokenizer import Batch, collate_tokens, load_tokenizer, train_tokenizer
from helpers.packs import unpack
from papers_helpers.made_texts import make_texts, sentences
from papers_helpers.refusals import read_or_refusal


def folder(root: Path, **options: Any) -> TextFolder:
    data = TextFolder(str(root), **{"vocabulary": 150, "length": 12, "batch_size": 4, "val_share": 0.2} | options)
    data.setup("fit")
    return data


def read(data: TextFolder, part: str) -> list[str]:
    """The samples of a part as text, with the hidden words put back."""
    found = []
    for words, labels, _ in data.parts[part]:
        found.append(data.tokenizer.decode(torch.where(labels >= 0, labels, words)[1:-1]))
    return found


def plain(lines: Iterable[str]) -> list[str]:
    """Lines as a tokenizer writes them."""
    return [line.replace(" .", ".") for line in lines]


# ---- parts -----------------------------------------------------------------------------------------------------------
def test_without_folders_the_end_of_every_file_is_kept_out(tmp_path: Path) -> None:
    data = folder(make_texts(tmp_path), unit="lines")
    train, val = read(data, "train"), read(data, "val")
    assert len(train) + len(val) == 180
    assert abs(len(val) - 36) <= 3
    files = [sentences(60, 0), sentences(40, 2), sentences(80, 1)]
    starts = [text.first - 1 for text in data.texts["val"]]
    assert train == plain(line for lines, start in zip(files, starts, strict=True) for line in lines[:start])
    assert val == plain(line for lines, start in zip(files, starts, strict=True) for line in lines[start:])


def test_with_folders_files_are_parted_by_them(tmp_path: Path) -> None:
    data = folder(make_texts(tmp_path, {"train": 30, "val": 7, "test": 9}), unit="lines")
    assert [len(data.parts[part]) for part in ("train", "val", "test", "predict")] == [30, 7, 9, 9]
    data = folder(make_texts(tmp_path / "two", {"train": 30, "val": 7}), unit="lines")
    assert [len(data.parts[part]) for part in ("train", "val", "test")] == [30, 7, 7]
    with pytest.raises(FolderError, match=r"there is no folder .*one/val"):
        folder(make_texts(tmp_path / "one", {"train": 30}))


def test_a_cut_is_at_a_line_and_nothing_is_lost() -> None:
    text = Text(Path("a.txt"), ["a" * 10, "b" * 10, "", "c" * 10, "d" * 200])
    for share in (0.01, 0.5, 0.9, 0.99):
        first, last = text.cut(share)
        assert first.lines + last.lines == text.lines
        assert last.first == len(first.lines) + 1
    assert text.cut(0.1)[1].lines == ["d" * 200]


# ---- samples ---------------------------------------------------------------------------------------------------------
def test_blocks_are_full_but_the_last_of_a_file_and_hold_the_text_in_order(tmp_path: Path) -> None:
    data = folder(make_texts(tmp_path))
    samples = [data.parts["train"][place] for place in range(len(data.parts["train"]))]
    lengths, expected = [len(words) for words, _, _ in samples], []
    for text in data.texts["train"]:  # six words a line, in blocks of ten
        full, rest = divmod(6 * len(text.lines), 10)
        expected += [12] * full + [rest + 2] * (rest > 0)
    assert lengths == expected
    words = " ".join(read(data, "train")).replace(" .", ".").replace(".", " .").split()
    assert words == " ".join(line for text in data.texts["train"] for line in text.lines).split()
    assert samples[0][2].endswith("a.txt: line 1")
    assert samples[1][2].endswith("a.txt: line 1 + 10 tokens")


def test_documents_are_parted_by_blank_lines_and_split_where_they_are_long(tmp_path: Path) -> None:
    text = "the whale sees the sea .\nthe ship follows .\n\n\n  \nthe sea .\n"
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.txt").write_text(text, encoding="utf-8")
    make_texts(tmp_path, {"val": 4})
    data = folder(tmp_path, unit="documents", length=8)
    found = [(len(words), name.partition(": ")[2]) for words, _, name in (data.parts["train"][i] for i in range(3))]
    assert found == [(8, "line 1"), (6, "line 1 + 6 tokens"), (5, "line 6")]
    assert len(folder(tmp_path, unit="lines").parts["train"]) == 3


def test_documents_that_are_too_long_are_refused_on_request(tmp_path: Path) -> None:
    root = make_texts(tmp_path, {"train": 3, "val": 3})
    data = folder(root, unit="lines", too_long="refuse", length=7)
    with pytest.raises(FolderError, match="3 texts are longer than length=7 tokens") as raised:
        data.train_dataloader()
    assert f"{root}/train/train.txt: line 1: 8 tokens" in str(raised.value)
    assert "fix: a larger length, as far as the network has positions, or too_long=split." in str(raised.value)
    assert len(folder(root, unit="lines", too_long="refuse", length=8).parts["train"]) == 3


def test_a_batch_is_padded_to_its_longest() -> None:
    samples = [(torch.arange(number), torch.full((number,), -100), str(number)) for number in (3, 5, 2)]
    batch = collate_tokens(9, samples)
    assert isinstance(batch, Batch)
    assert batch.words.tolist() == [[0, 1, 2, 9, 9], [0, 1, 2, 3, 4], [0, 1, 9, 9, 9]]
    assert batch.mask.sum(1).tolist() == [3, 5, 2]
    assert batch.labels.unique().tolist() == [-100]
    assert batch.names == ["3", "5", "2"]


# ---- hidden words ----------------------------------------------------------------------------------------------------
def test_words_are_hidden_as_bert_does(tmp_path: Path) -> None:
    data = folder(make_texts(tmp_path, {"train": 2000, "val": 10}), length=128, share=0.3)
    words, labels = (torch.cat(parts) for parts in list(zip(*data.parts["train"], strict=True))[:2])
    special = torch.isin(words, torch.tensor([data.tokenizer.cls_token_id, data.tokenizer.sep_token_id]))
    hidden = labels >= 0
    assert not hidden[(words == data.tokenizer.cls_token_id) & ~hidden].any()
    # Binomial: five deviations.
    number = int((~special).sum())
    assert abs(int(hidden.sum()) - 0.3 * number) < 5 * (0.21 * number) ** 0.5
    masked, kept = words[hidden] == data.tokenizer.mask_token_id, words[hidden] == labels[hidden]
    total = int(hidden.sum())
    assert abs(int(masked.sum()) - 0.8 * total) < 5 * (0.16 * total) ** 0.5
    # A random word is the right one now and then.
    expected = 0.1 * total * (1 + 1 / len(data.tokenizer))
    assert abs(int(kept.sum()) - expected) < 5 * (0.09 * total) ** 0.5


def test_training_hides_other_words_in_every_epoch_and_what_is_measured_stays(tmp_path: Path) -> None:
    data = folder(make_texts(tmp_path))
    first, second = (next(iter(data.val_dataloader())) for _ in range(2))
    assert torch.equal(first.words, second.words)
    again = folder(tmp_path)
    assert torch.equal(next(iter(again.val_dataloader())).words, first.words)
    samples = [data.parts["train"][0] for _ in range(8)]
    assert len({tuple(words.tolist()) for words, _, _ in samples}) > 1
    # The same seed and epoch: the same order and the same words.
    batches = [next(iter(each.train_dataloader())) for each in (data, again)]
    assert torch.equal(batches[0].words, batches[1].words)


# ---- tokenizers ------------------------------------------------------------------------------------------------------
def test_a_tokenizer_is_trained_on_the_training_text_alone_and_the_same_each_time(tmp_path: Path) -> None:
    root = make_texts(tmp_path, {"train": 50, "val": 2})
    (root / "val" / "val.txt").write_text("zebra zebra zebra zebra\n", encoding="utf-8")
    words = [folder(root).tokenizer.get_vocab() for _ in range(2)]
    assert words[0] == words[1]
    assert "whale" in words[0]
    assert "zebra" not in words[0]
    assert [words[0][word] for word in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")] == [0, 1, 2, 3, 4]


def test_a_saved_tokenizer(tmp_path: Path) -> None:
    made = train_tokenizer(sentences(50), 150)
    made.save_pretrained(tmp_path / "tokenizer")
    data = folder(make_texts(tmp_path / "text"), tokenizer=str(tmp_path / "tokenizer"))
    assert data.tokenizer.get_vocab() == made.get_vocab()
    assert load_tokenizer(tmp_path / "tokenizer")("the whale")["input_ids"] == made("the whale")["input_ids"]
    with pytest.raises(FolderError, match="there is no tokenizer folder"):
        load_tokenizer(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FolderError, match="empty holds no tokenizer: "):
        load_tokenizer(tmp_path / "empty")


def test_a_tokenizer_without_a_mask_is_refused(tmp_path: Path) -> None:
    import transformers

    made = train_tokenizer(sentences(50), 150)
    bare = transformers.PreTrainedTokenizerFast(tokenizer_object=made.backend_tokenizer, pad_token="[PAD]")
    bare.save_pretrained(tmp_path)
    with pytest.raises(FolderError, match="no unk, cls, sep, mask token"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "content",
    [b"", b"[" * 100_000, b"\xff\xfe\0", b"5", b"[1]", b'{"model": 5}'],
    ids=["empty", "lists in lists", "UTF-16", "number", "list", "no model"],
)
def test_a_damaged_tokenizer_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    train_tokenizer(sentences(50), 150).save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(content)
    found, refusal = read_or_refusal(lambda: load_tokenizer(tmp_path))
    assert str(tmp_path) in refusal if found is None else found.mask_token == "[MASK]"


@pytest.mark.parametrize("text", ["", "{", "[" * 10_000, "5", None])
def test_a_damaged_tokenizer_of_a_checkpoint_is_refused(tmp_path: Path, text: Any) -> None:
    data = folder(make_texts(tmp_path))
    state = data.state_dict() | {"tokenizer": text}
    with pytest.raises(FolderError, match=r"TextFolder: .*tokenizer is damaged: .*; fix: train anew"):
        data.load_state_dict(state)


def test_a_tokenizer_brings_no_code(tmp_path: Path) -> None:
    train_tokenizer(sentences(50), 150).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    names = {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": [None, "theirs.Theirs"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | names))
    (tmp_path / "theirs.py").write_text("open('ran', 'w')\nclass Theirs: pass\n")
    with contextlib.chdir(tmp_path), contextlib.suppress(FolderError):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_brings_the_tokenizer(tmp_path: Path) -> None:
    root = make_texts(tmp_path / "text")
    data = folder(root)
    state = data.state_dict()
    assert all(isinstance(value, str | int | list | dict) for value in state.values())
    (tmp_path / "lines.txt").write_text("the [MASK] sees the [MASK] .\n", encoding="utf-8")
    alone = TextFolder(predict=str(tmp_path / "lines.txt"), length=12)
    alone.setup("predict")
    with pytest.raises(FolderError, match="no tokenizer; fix: --ckpt_path"):
        alone.predict_dataloader()
    alone.load_state_dict(state)
    (batch,) = alone.predict_dataloader()
    assert data.tokenizer.decode(batch.words[0]) == "[CLS] the [MASK] sees the [MASK]. [SEP]"
    assert batch.names == ["line 1"]
    other = folder(root, tokenizer=str(save(tmp_path / "other", 90)))
    with pytest.raises(FolderError, match=r"other has other words than the checkpoint's, \d+ and \d+; fix: leave"):
        other.load_state_dict(state)


def save(place: Path, vocabulary: int) -> Path:
    train_tokenizer(sentences(50), vocabulary).save_pretrained(place)
    return place


# ---- bad input -------------------------------------------------------------------------------------------------------
def test_text_that_is_not_utf_8_is_named_with_its_byte(tmp_path: Path) -> None:
    make_texts(tmp_path)
    (tmp_path / "latin.txt").write_bytes("the whale\nna\xefve sea\n".encode("latin-1"))
    (tmp_path / "wide.txt").write_bytes("sea".encode("utf-16"))
    with pytest.raises(FolderError, match=r"2 of the 5 files in .* cannot be read") as raised:
        folder(tmp_path)
    text = str(raised.value)
    assert "latin.txt is not UTF-8: byte 12 (0xef, line 2): invalid continuation byte; fix: iconv" in text
    assert "wide.txt is not UTF-8: byte 0 (0xff, line 1): invalid start byte" in text


def test_utf_8_with_a_mark_and_other_line_ends_is_read(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.txt").write_bytes(b"\xef\xbb\xbfthe whale\r\nna\xc3\xafve sea\r\n")
    make_texts(tmp_path, {"val": 4})
    data = folder(tmp_path)
    assert data.texts["train"][0].lines == ["the whale", "naïve sea"]


def test_folders_without_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match=r"there is no folder .*none"):
        folder(tmp_path / "none")
    with pytest.raises(FolderError, match=r"no text files \(\.txt\)"):
        folder(tmp_path)
    (tmp_path / "a.csv").write_text("a", encoding="utf-8")
    (tmp_path / ".hidden.txt").write_text("a", encoding="utf-8")
    with pytest.raises(FolderError, match=r"has no text files \(\.txt\); it holds a.csv"):
        folder(tmp_path)
    (tmp_path / "a.txt").write_text("\n  \n\n", encoding="utf-8")
    with pytest.raises(FolderError, match=r"the train part of .* no text .*1 files; fix:"):
        folder(tmp_path)
    (tmp_path / "a.txt").write_text("one line alone", encoding="utf-8")
    with pytest.raises(FolderError, match="the train part of"):
        folder(tmp_path)


def test_lines_to_fill_are_checked(tmp_path: Path) -> None:
    make_texts(tmp_path / "text")
    lines = tmp_path / "lines.txt"

    def loader() -> Any:
        data = TextFolder(str(tmp_path / "text"), vocabulary=150, length=12, predict=str(lines))
        data.setup("predict")
        return data.predict_dataloader()

    with pytest.raises(FolderError, match=r"cannot read .*lines.txt: No such file"):
        loader()
    lines.write_text("\n\n", encoding="utf-8")
    with pytest.raises(FolderError, match=r"lines.txt has no lines"):
        loader()
    lines.write_text("the [MASK] .\nthe sea .\n\nthe ship .\n", encoding="utf-8")
    with pytest.raises(FolderError, match=r"lines without \[MASK\], .*: 2, 4; fix: write \[MASK\] where"):
        loader()
    lines.write_text("the [MASK] .\n" + "the [MASK] sees " * 5, encoding="utf-8")
    text = r"1 texts are longer than length=12 tokens\.\n.*lines.txt: line 2: 17[\s\S]*, or shorter lines\."
    with pytest.raises(FolderError, match=text):
        loader()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"root": None}, "give root, a folder of text files, or predict"),
        ({"length": 2}, "length must be 3 at least"),
        ({"share": 0.0}, "share must lie between 0 and 1, got 0.0"),
        ({"val_share": 1.0}, "val_share must lie between 0 and 1, got 1.0"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(FolderError, match=text):
        TextFolder(**{"root": "text"} | options)


# ---- real text -------------------------------------------------------------------------------------------------------
@pytest.mark.data
def test_the_text_corpus(data: Path, tmp_path: Path) -> None:
    unpack(data / "text" / "text.tar.xz", tmp_path, lambda name: name == "./text/tinyshakespeare/train.txt")
    found = folder(tmp_path, vocabulary=1000, length=64)
    batch = next(iter(found.val_dataloader()))
    assert batch.words.shape == (4, 64)
    assert len(found.tokenizer) == 1000
    unknown = sum(int((sample[0] == found.tokenizer.unk_token_id).sum()) for sample in found.parts["val"])
    assert unknown < 1e-3 * 64 * len(found.parts["val"])


def test_a_text_that_a_network_learns_by_heart_is_warned_of(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    for number, lines in (("1", 20), ("2", 20_000)):
        (tmp_path / number).mkdir()
        for name in ("a", "b"):
            (tmp_path / number / f"{name}.txt").write_text("the whale sees the sea .\n" * lines, encoding="utf-8")
    with pytest.warns(UserWarning, match=r"TextFolder: .*/1 has 9\d\d characters .* by heart; fix: 100,000 or more"):
        TextFolder(str(tmp_path / "1")).setup("fit")
    recwarn.clear()
    TextFolder(str(tmp_path / "2")).setup("fit")
    assert not [each for each in recwarn if "by heart" in str(each.message)]
