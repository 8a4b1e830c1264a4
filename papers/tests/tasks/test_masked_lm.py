"""MaskedLM: it learns, its optimiser and schedule are BERT's, and what it logs is measured over all hidden words."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from farfield import ShapeError
from farfield_papers import models
from farfield_papers.data.tokenizer import train_tokenizer
from farfield_papers.tasks.checkpoints import CheckpointError
from farfield_papers.tasks.masked_lm import Filled, MaskedLM, compute_rate, compute_word_loss
from farfield_papers.tasks.writers.filled_blanks import FilledTable, format_csv, list_samples
from papers_helpers.made_texts import sentences
from papers_helpers.quiet import QUIET, TASK_MARKS

pytestmark = TASK_MARKS


class Batch(NamedTuple):
    words: Tensor
    mask: Tensor
    labels: Tensor
    names: list[str]


class Made(LightningDataModule):
    """Batches as a data module."""

    def __init__(self, batches: list[Batch], tokenizer: Any = None) -> None:
        super().__init__()
        self.batches, self.tokenizer = batches, tokenizer or range(0)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def texts(number: int, words: int = 20, length: int = 9, hidden: float = 0.3) -> Batch:
    """Rows that count up, some of whose words are hidden behind 0, with padding of different lengths."""
    start = torch.randint(1, words, (number, 1))
    whole = (start + torch.arange(length)) % (words - 1) + 1
    mask = torch.arange(length) < torch.randint(length // 2, length + 1, (number, 1))
    chosen = (torch.rand(number, length) < hidden) & mask
    labels = torch.where(chosen, whole, -100)
    return Batch(torch.where(chosen, 0, whole), mask, labels, [str(place) for place in range(number)])


def padding() -> Batch:
    """A batch in which nothing is valid."""
    return Batch(torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 5).bool(), torch.full((2, 5), -100), ["a", "b"])


def small(operator: str = "factorized_gaussian", **options: Any) -> MaskedLM:
    net = models.bert_small(operator, vocabulary=20, positions=9, channels=32, layers=2, dropout=0.0)
    return MaskedLM(net, **{"learning_rate": 3e-3, "warmup_steps": 1} | options)


def fitted(module: MaskedLM, data: Made, epochs: int = 2, **options: Any) -> Trainer:
    trainer = Trainer(max_epochs=epochs, **QUIET | {"num_sanity_val_steps": 0} | options)
    trainer.fit(module, datamodule=data)
    return trainer


# ---- learning --------------------------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize("operator", ["factorized_gaussian", "softmax", "factorized"])
def test_it_overfits_one_batch(operator: str) -> None:
    batch = texts(4)
    module = small(operator, learning_rate=1e-2, warmup_steps=10)
    fitted(module, Made([batch] * 25), epochs=6)
    trainer = Trainer(**QUIET)
    [logged] = trainer.test(module, datamodule=Made([batch]), verbose=False)
    assert logged["test/accuracy"] == 1.0
    assert logged["test/loss"] < 0.1


def test_only_hidden_words_count_and_padding_does_not() -> None:
    module, batch = small().eval(), texts(6)
    logits, labels = module._hidden(batch)
    assert logits.shape == (int((batch.labels >= 0).sum()), 20)
    other = batch._replace(words=torch.where(batch.mask, batch.words, 13))
    assert torch.equal(module._hidden(other)[0], logits)
    wanted = -sum(
        float(logits[place].double().log_softmax(0)[label]) for place, label in enumerate(labels.tolist())
    ) / len(labels)
    assert float(compute_word_loss(logits, labels)) == pytest.approx(wanted, rel=1e-5)


# ---- what is logged --------------------------------------------------------------------------------------------------
def test_what_is_logged_is_over_all_hidden_words_of_all_batches() -> None:
    batches = [texts(2, hidden=0.9), texts(7, hidden=0.1), padding()]
    module = small()
    [logged] = Trainer(**QUIET).validate(module, datamodule=Made(batches), verbose=False)
    module.eval()
    total, right, number = 0.0, 0, 0
    with torch.no_grad():
        for batch in batches[:2]:
            every = module.network(batch.words, mask=batch.mask).double().log_softmax(2)
            for row, place in (batch.labels >= 0).nonzero().tolist():
                label = int(batch.labels[row, place])
                total -= float(every[row, place, label])
                right += int(every[row, place].argmax()) == label
                number += 1
    assert logged["val/loss"] == pytest.approx(total / number, rel=1e-5)
    assert logged["val/perplexity"] == pytest.approx(math.exp(total / number), rel=1e-5)
    assert logged["val/accuracy"] == pytest.approx(right / number, rel=1e-6)


def test_a_batch_that_is_all_padding_has_no_loss_and_no_nan() -> None:
    module = small(weight_decay=0.0)
    before = {name: tensor.clone() for name, tensor in module.network.state_dict().items()}
    trainer = fitted(module, Made([padding(), padding()]))
    assert float(trainer.callback_metrics["train/loss"]) == 0.0
    assert all(torch.equal(before[name], tensor) for name, tensor in module.network.state_dict().items())
    [logged] = Trainer(**QUIET).test(module, datamodule=Made([padding()]), verbose=False)
    assert logged == {"test/loss": 0.0, "test/perplexity": 1.0, "test/accuracy": 0.0}


# ---- BERT's settings -------------------------------------------------------------------------------------------------
def test_the_rate_rises_and_falls_linearly() -> None:
    rates = [compute_rate(step, 10, 100) for step in range(101)]
    assert rates[0] == 0.1
    assert rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[100] == 0.0
    assert [compute_rate(step, 0, 4) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    module = small()
    trainer = fitted(module, Made([texts(2)] * 2), epochs=1)
    decayed, plain = trainer.optimizers[0].param_groups
    names = {id(parameter): name for name, parameter in module.network.named_parameters()}
    assert decayed["weight_decay"] == 0.01
    assert plain["weight_decay"] == 0.0
    assert all("norm" not in names[id(each)] and not names[id(each)].endswith("bias") for each in decayed["params"])
    assert {names[id(each)].rpartition(".")[2] for each in plain["params"]} == {"bias", "weight"}
    assert len(decayed["params"]) + len(plain["params"]) == len(names)
    assert trainer.optimizers[0].defaults["betas"] == (0.9, 0.999)
    assert trainer.optimizers[0].defaults["eps"] == 1e-6
    assert MaskedLM(module.network).hparams["learning_rate"] == 1e-4


@pytest.mark.parametrize(("given", "longest"), [(None, 1.0), (0.25, 0.25)])
def test_gradients_are_shortened(given: float | None, longest: float) -> None:
    lengths: list[float] = []

    class Watched(MaskedLM):
        def configure_gradient_clipping(self, *arguments: Any, **named: Any) -> None:
            for parameter in self.network.parameters():
                parameter.grad *= 1e3
            super().configure_gradient_clipping(*arguments, **named)
            lengths.append(float(torch.stack([each.grad.norm() for each in self.network.parameters()]).norm()))

    fitted(Watched(small().network, warmup_steps=1), Made([texts(4)] * 2), epochs=1, gradient_clip_val=given)
    assert lengths == pytest.approx([longest] * 2, rel=1e-4)


def test_a_warm_up_as_long_as_the_training_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"warmup_steps=40 .* 40 steps .*--model\.warmup_steps 4 "):
        fitted(small(warmup_steps=40), Made([texts(2)] * 20))


def test_a_network_with_too_few_words_is_refused() -> None:
    tokenizer = train_tokenizer(sentences(50), 150)
    words = texts(2)
    with pytest.raises(ShapeError, match=r"MaskedLM: .* \d+ words, .* 20\b") as raised:
        fitted(small(), Made([words] * 4, tokenizer))
    assert f"--model.network.vocabulary {len(tokenizer)}" in str(raised.value)


def test_the_checkpoint_of_another_network_is_refused(tmp_path: Path) -> None:
    module, data = small(), Made([texts(2)] * 4)
    fitted(module, data).save_checkpoint(tmp_path / "a.ckpt")
    other = MaskedLM(models.bert_small(vocabulary=20, positions=9, channels=16), warmup_steps=1)
    with pytest.raises(CheckpointError, match="the checkpoint is of another network"):
        Trainer(**QUIET).validate(other, datamodule=data, ckpt_path=tmp_path / "a.ckpt", weights_only=True)


# ---- filling ---------------------------------------------------------------------------------------------------------
def test_blanks_are_filled_with_the_likeliest_words() -> None:
    batch = texts(4)
    module = small(blank=0, top=3).eval()
    filled = module.predict_step(batch, 0)
    with torch.no_grad():
        logits = module.network(batch.words, mask=batch.mask)
    for place in range(4):
        blanks = (batch.words[place] == 0) & batch.mask[place]
        probabilities, wanted = logits[place][blanks].softmax(1).topk(3)
        assert torch.equal(filled.found[place], wanted)
        torch.testing.assert_close(filled.probabilities[place], probabilities)
        assert torch.equal(filled.words[place], batch.words[place][batch.mask[place]])


def test_what_is_written(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(sentences(50), 150)
    words = torch.tensor(tokenizer("the [MASK] sees the [MASK] .")["input_ids"])
    ids = tokenizer.convert_tokens_to_ids(["whale", "sea", "ship", "captain"])
    filled = Filled(["line 1"], [words], [torch.tensor(ids).view(2, 2)], [torch.tensor([[0.5, 0.25], [0.75, 0.125]])])
    [sample] = list_samples(filled, tokenizer)
    assert sample["text"] == "the [MASK] sees the [MASK]."
    assert sample["filled"] == "the whale sees the ship."
    assert sample["blanks"][1] == [{"word": "ship", "probability": 0.75}, {"word": "captain", "probability": 0.125}]
    assert format_csv([sample]).splitlines()[:3] == [
        "name,blank,rank,word,probability",
        "line 1,1,1,whale,0.500000",
        "line 1,1,2,sea,0.250000",
    ]
    with pytest.raises(ValueError, match=r"FilledTable: words.txt must end in \.json or \.csv"):
        FilledTable("words.txt")
