"""Masked language models: the loss at hidden words, BERT's optimiser and schedule, and perplexity."""

from __future__ import annotations

from typing import Any, NamedTuple

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.text import Perplexity

from farfield._checks import shape_error
from farfield._refusals import put_name
from farfield_papers.tasks.training_task import TrainingTask

# Label of tokens that the loss and the measures ignore.
_IGNORED = -100


# Ids of words (batch, tokens), the mask of valid ones, labels (the hidden words, else -100), names of the samples.
_Batch = tuple[Tensor, Tensor, Tensor, list[str]]


class Filled(NamedTuple):
    """Result of `predict_step` for a batch."""

    names: list[str]
    words: list[Tensor]  # ids, as they were read, without padding
    found: list[Tensor]  # `(blanks, top)`, ids of the likeliest words of each blank, the likeliest first
    probabilities: list[Tensor]  # of the words in `found`


class MaskedLM(TrainingTask):
    """Train a network that computes one logit per word for each hidden token; defaults are the settings of BERT.

    `loss = mean over hidden tokens of -log softmax(logits)[word]`

    Hidden tokens are those with a label other than -100, which the data replace or leave as they are. AdamW; the
    learning rate rises over the first steps and falls to 0 after the last, both linearly. Matrices have weight decay,
    norms and biases do not. Gradients with a norm above `clip` are scaled down to it. The network computes logits of
    hidden tokens alone; a batch without hidden tokens has the loss 0. Logged: `train/loss`, `learning_rate`, and
    `val/loss`, `val/perplexity`, `val/accuracy` over all hidden tokens of the split, the same for `test`.

    Args:
        network: Any module `(words, mask=…, chosen=…) -> logits`, as `models.Bert`; `words` and the boolean `mask` and
            `chosen` are `(batch, tokens)`, and it returns `(tokens, vocabulary)` for the tokens in `chosen`.
        learning_rate: The highest learning rate.
        warmup_steps: Steps over which the learning rate rises.
        betas: Betas of AdamW.
        epsilon: Epsilon of AdamW.
        weight_decay: Weight decay of matrices, which include the embeddings.
        clip: Largest norm of the gradient of all parameters; the trainer's `gradient_clip_val` takes precedence.
        top: Number of words that `predict` returns for each blank.
        blank: Id of the mask token for `predict`, used only if there is no data module; a data module's tokenizer has
            its own.

    Raises:
        ShapeError: In the first batch, if the tokenizer has more words than the network, or without a tokenizer if an
            id is too large for the network.

    Reference: Devlin et al. 2019.

    Example:
        >>> import torch
        >>> from farfield_papers import models
        >>> task = MaskedLM(models.bert_small(vocabulary=100))
        >>> words = torch.randint(100, (2, 9))
        >>> task(words, torch.ones_like(words, dtype=torch.bool), words > 50).shape[1]
        100
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        learning_rate: float = 1e-4,
        warmup_steps: int = 10_000,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-6,
        weight_decay: float = 0.01,
        clip: float = 1.0,
        top: int = 5,
        blank: int | None = None,
    ) -> None:
        super().__init__(network)
        self.hidden, self.loss, self.accuracy = SumMetric(), MeanMetric(), MeanMetric()
        self.perplexity = Perplexity(ignore_index=_IGNORED)

    def forward(self, words: Tensor, mask: Tensor, chosen: Tensor) -> Tensor:
        """Return the logits `(tokens, vocabulary)` of the chosen tokens."""
        return self.network(words, mask=mask, chosen=chosen)

    def training_step(self, batch: _Batch, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        if batch_idx == 0:
            self._check_vocabulary(batch[0])
        logits, labels = self._hidden(batch)
        loss = compute_word_loss(logits, labels)
        self._log_loss(loss, max(1, len(labels)))
        self._log_rate()
        return loss

    def predict_step(self, batch: _Batch, batch_idx: int) -> Filled:
        """Return the likeliest words of each blank, that is of each mask token."""
        if batch_idx == 0:
            self._check_vocabulary(batch[0])
        words, mask, _, names = batch
        data = getattr(self._trainer, "datamodule", None)
        blank = self.hparams["blank"] if data is None else data.tokenizer.mask_token_id
        chosen = (words == blank) & mask
        # A network may have a larger vocabulary than the tokenizer.
        logits = self(words, mask, chosen).float()[:, : None if data is None else len(data.tokenizer)]
        probabilities, likeliest = logits.softmax(1).topk(min(self.hparams["top"], logits.shape[1]))
        blanks = chosen.sum(1).tolist()
        texts = [each[valid].cpu() for each, valid in zip(words, mask, strict=True)]
        return Filled(list(names), texts, list(likeliest.cpu().split(blanks)), list(probabilities.cpu().split(blanks)))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return AdamW on two groups of parameters, with and without weight decay, and its schedule per step."""
        settings = self.hparams
        trained = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [parameter for parameter in trained if parameter.dim() > 1]},
            {"params": [parameter for parameter in trained if parameter.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizer = AdamW(
            groups,
            lr=settings["learning_rate"],
            betas=tuple(settings["betas"]),
            eps=settings["epsilon"],
            weight_decay=settings["weight_decay"],
        )
        steps, warmup = int(self.trainer.estimated_stepping_batches), settings["warmup_steps"]
        if warmup >= steps:
            rank_zero_warn(
                f"MaskedLM: warmup_steps={warmup:,} are not fewer than the {steps:,} steps of the training, so the "
                f"learning rate never falls; fix: --model.warmup_steps {steps // 10} for a warm-up of a tenth of them."
            )
        schedule = LambdaLR(optimizer, lambda step: compute_rate(step, warmup, steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the norm of the gradient to the trainer's `gradient_clip_val` if given, and else to `clip`."""
        largest = self.hparams["clip"] if gradient_clip_val is None else gradient_clip_val
        self.clip_gradients(optimizer, largest, gradient_clip_algorithm or "norm")

    def _hidden(self, batch: _Batch) -> tuple[Tensor, Tensor]:
        words, mask, labels, _ = batch
        chosen = labels != _IGNORED
        return self(words, mask, chosen), labels[chosen]

    def _evaluate(self, stage: str, batch: _Batch, batch_idx: int) -> None:
        if batch_idx == 0:
            self._check_vocabulary(batch[0])
        logits, labels = self._hidden(batch)
        if not len(labels):
            return
        logits = logits.float()
        self.hidden.update(len(labels))
        self.loss.update(compute_word_loss(logits, labels), len(labels))
        self.perplexity.update(logits[None], labels[None])
        self.accuracy.update(logits.argmax(1) == labels)

    def _measure(self, stage: str) -> None:
        measures = {"loss": self.loss, "perplexity": self.perplexity, "accuracy": self.accuracy}
        values = {"loss": 0.0, "perplexity": 1.0, "accuracy": 0.0}
        # The count of hidden tokens over all processes, which must agree on whether to compute the measures.
        if float(self.hidden.compute()):
            values = {name: float(measure.compute()) for name, measure in measures.items()}
        self.log_dict({f"{stage}/{name}": value for name, value in values.items()}, prog_bar=True)
        for measure in (self.hidden, *measures.values()):
            measure.reset()

    def _check_vocabulary(self, words: Tensor) -> None:
        # Before an index is out of range.
        has = getattr(self.network, "vocabulary", None)
        tokenizer = getattr(getattr(self._trainer, "datamodule", None), "tokenizer", None)
        needs = int(words.max()) + 1 if tokenizer is None else len(tokenizer)
        if has is not None and has < needs:
            known = f"the tokenizer has {needs:,} words"
            if tokenizer is None:
                known = f"the batch has the word {needs - 1:,}, so that there are at least {needs:,} words"
            problem = f"{known}, and the network has {has:,}."
            fix = f"build the network with vocabulary={needs} or more (--model.network.vocabulary {needs})."
            raise put_name("MaskedLM", shape_error(problem, fix, words=words))


def compute_word_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of logits `(tokens, vocabulary)`, averaged over the tokens; 0 without tokens."""
    return functional.cross_entropy(logits, labels, reduction="sum") / max(1, len(labels))


def compute_rate(step: int, warmup: int, steps: int) -> float:
    """Return the factor of the highest learning rate: it rises over the warm-up and is 0 after the last step."""
    rising = (step + 1) / warmup if step < warmup else 1.0
    return max(0.0, min(rising, (steps - step) / max(1, steps - warmup), 1.0))
