"""BERT with any operator as its attention: conventional, or FA's factorized Transformer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from farfield._checks import shape_error
from farfield._operators import DEFAULT
from farfield._refusals import put_name
from farfield.nn import TransformerLayer
from farfield.nn.initialization import DrawnByItself
from farfield.ops.table import Operator
from farfield_papers.models.bert_weights import fill_from_file
from farfield_papers.models.choices import bind_arguments, check_choice, check_numbers, find_operator
from farfield_papers.models.storage import Stored

_HEADS = ("words", "pooled")
_VARIANTS = ("bert_base", "bert_large", "bert_small")
_EPSILON, _DEVIATION = 1e-12, 0.02


class Bert(Stored, nn.Module, library_name="farfield", pipeline_tag="fill-mask"):
    """Encode texts; return a logit for each token and word of the vocabulary, or one vector for each text.

    `tokens = norm(words + positions + types)`, `layers` times `nn.TransformerLayer`, then the head

    The weights have BERT's shapes for every operator but those that learn more: siamese and siamese_local have score
    vectors, flare has latents and no queries, hedgehog has maps. So a factorized BERT loads the weights of a
    conventional one, whose queries and keys become coefficients and basis (`weights` of `bert_base`, or
    `models.load_hugging_face`). It then computes another function and needs training. The word head is tied: it
    multiplies by the embedding of the words.

    Args:
        model: The name under which the network is saved: `"bert_base"`, `"bert_large"` or `"bert_small"`.
        operator: A name of `ops.OPERATORS` or an `Operator`. Products under a softmax are divided by the square root
            of a head's channels, as in transformers; other products are not.
        head: `"words"`, for masked language models, or `"pooled"`, a linear layer and tanh of the first token.
        vocabulary: Number of words.
        positions: Largest number of tokens of a text.
        channels: Channels of each token; the feed-forward layers have four times as many.
        layers: Number of layers.
        heads: Heads of the attention.
        dropout: Dropout, in training, of the embeddings and of each layer's residual branches.
        attention_dropout: See `nn.TransformerLayer`; BERT uses 0.1, which forms N×N numbers for `"softmax"`.

    Raises:
        LookupError: For an unknown operator or head.
        ShapeError: If heads do not divide the channels.
        ValueError: For a number out of range, or attention dropout with an operator that cannot have it.

    Reference: Devlin et al. 2019, FA Figure 5.

    Example:
        >>> from farfield_papers import models
        >>> net = models.bert_small("factorized_gaussian", vocabulary=1000)
        >>> net(torch.randint(1000, (2, 50))).shape
        torch.Size([2, 50, 1000])
    """

    # Of the argument that says which tokens are valid; `linearize` asks for it.
    mask_name = "mask"

    # A model card counts the MACs of a text, not of an image.
    reads_words = True

    def __init__(
        self,
        model: str = "bert_base",
        *,
        operator: str | Operator = DEFAULT,
        head: str = "words",
        vocabulary: int = 30522,
        positions: int = 512,
        channels: int = 768,
        layers: int = 12,
        heads: int = 12,
        dropout: float = 0.1,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.config = bind_arguments(locals(), _VARIANTS)
        check_numbers(model, vocabulary=vocabulary, positions=positions, channels=channels, layers=layers, heads=heads)
        check_choice(model, "head", head, _HEADS)
        find_operator(model, operator)
        self.name, self.vocabulary = model, vocabulary
        self.words, self.positions = nn.Embedding(vocabulary, channels), nn.Embedding(positions, channels)
        self.types, self.norm = nn.Embedding(2, channels), nn.LayerNorm(channels, _EPSILON)
        self.dropout = nn.Dropout(dropout)
        options: dict[str, Any] = {"heads": heads, "dropout": dropout, "attention_dropout": attention_dropout}
        self.layers = nn.ModuleList(
            TransformerLayer(channels, operator, **options, epsilon=_EPSILON) for _ in range(layers)
        )
        self.head = WordHead(channels, vocabulary) if head == "words" else Pooled(channels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights as BERT, normal with deviation 0.02 and truncated at two deviations; attention draws its own.

        With a deviation of 0.02 a projection scales its input by about a half at 768 channels and by a fifth at 128;
        the response of attention, which is up to cubic in its projections, would be nearly 0. At the start it is nearly
        the same for all tokens, so that after a few layers tokens would differ by little: each output projection is
        divided by √(2·layers), as GPT-2 divides the last projection of each of its 2·layers residual branches.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.trunc_normal_(module.weight, std=_DEVIATION, a=-2 * _DEVIATION, b=2 * _DEVIATION)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for layer in self.layers:
            attention = cast(TransformerLayer, layer).attention
            attention.reset_parameters()
            if attention.output is not None:
                with torch.no_grad():
                    attention.output.weight.div_(math.sqrt(2 * len(self.layers)))

    def card_shape(self, side: int) -> tuple[int, ...]:
        """Return the shape of the text whose MACs a model card counts, in tokens."""
        return (min(side, self.positions.num_embeddings),)

    def encode(
        self, words: Int[Tensor, "b n"], *, mask: Bool[Tensor, "b n"] | None = None, types: Tensor | None = None
    ) -> Float[Tensor, "b n c"]:
        """Return the last layer's output for each token; the arguments are those of `forward`."""
        if words.dim() != 2 or words.is_floating_point():
            fix = "words[None] adds a batch, words.long() makes whole numbers."
            raise put_name(self.name, shape_error("words must be whole numbers (batch, tokens).", fix, words=words))
        longest = self.positions.num_embeddings
        if words.shape[1] > longest:
            problem = f"{words.shape[1]} tokens are more than the network's {longest} positions."
            fix = f"split the text, or build it with positions={words.shape[1]}."
            raise put_name(self.name, shape_error(problem, fix, words=words))
        types = torch.zeros_like(words) if types is None else types
        tokens = (
            self.words(words) + self.types(types) + self.positions(torch.arange(words.shape[1], device=words.device))
        )
        tokens = self.dropout(self.norm(tokens))
        for layer in self.layers:
            tokens = layer(tokens, mask=mask)
        return tokens

    def forward_features(
        self, words: Int[Tensor, "b n"], *, mask: Bool[Tensor, "b n"] | None = None, types: Tensor | None = None
    ) -> Float[Tensor, "b n c"]:
        """Return what `encode` does, by timm's name for what is before the head, which `linearize` matches."""
        return self.encode(words, mask=mask, types=types)

    def forward(
        self,
        words: Int[Tensor, "b n"],
        *,
        mask: Bool[Tensor, "b n"] | None = None,
        types: Int[Tensor, "b n"] | None = None,
        chosen: Bool[Tensor, "b n"] | None = None,
    ) -> Tensor:
        """Return the logits of the words, or the pooled vectors.

        Args:
            words: Indices into the vocabulary.
            mask: True where a token is valid; words at other positions do not change the results of valid tokens.
            types: Which of two texts a token is in, 0 or 1; 0 by default.
            chosen: True where logits are computed; everywhere by default. Training needs them at the masked tokens
                only: a seventh of the head's work and memory. The pooled head ignores this argument.

        Returns:
            `(b, n, vocabulary)`, or `(tokens chosen, vocabulary)`; with the pooled head `(b, channels)`.

        Raises:
            ShapeError: If words are not whole numbers (batch, tokens), if there are more tokens than positions, or if
                the mask does not fit.
        """
        tokens = self.encode(words, mask=mask, types=types)
        if isinstance(self.head, Pooled):
            return self.head(tokens)
        return self.head(tokens if chosen is None else tokens[chosen], self.words.weight)


class WordHead(nn.Module):
    """BERT's masked-language head: a linear layer, GELU, a norm, products with the word embedding, and a bias."""

    _is_hf_initialized = DrawnByItself()

    def __init__(self, channels: int, vocabulary: int) -> None:
        super().__init__()
        self.transform, self.norm = nn.Linear(channels, channels), nn.LayerNorm(channels, _EPSILON)
        self.bias = nn.Parameter(torch.empty(vocabulary))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the bias to 0."""
        nn.init.zeros_(self.bias)

    def forward(self, tokens: Tensor, words: Tensor) -> Tensor:
        """Return the logits of tokens `(…, channels)`; `words` is the embedding `(vocabulary, channels)`."""
        return functional.linear(self.norm(functional.gelu(self.transform(tokens))), words, self.bias)


class Pooled(nn.Module):
    """BERT's pooler: a linear layer and tanh of the first token."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dense = nn.Linear(channels, channels)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the vector of each text, `(b, channels)`, from tokens `(b, n, channels)`."""
        return self.dense(tokens[:, 0]).tanh()


def bert_base(
    operator: str | Operator = DEFAULT,
    *,
    head: str = "words",
    vocabulary: int = 30522,
    positions: int = 512,
    dropout: float = 0.1,
    attention_dropout: float = 0.0,
    weights: str | Path | None = None,
) -> Bert:
    """Build BERT base, with 12 layers and 768 channels, and any operator.

    The arguments are those of `Bert`, and `weights`: a weights file of Hugging Face's BERT (`model.safetensors`,
    `pytorch_model.bin`) or of a saved `Bert`; None draws the weights at random.

    Reference: Devlin et al. 2019.

    Example:
        >>> with torch.device("meta"):
        ...     counts = [sum(p.numel() for p in bert_base(head=head).parameters()) for head in ("pooled", "words")]
        >>> counts
        [109482240, 109514298]
    """
    return _build("bert_base", **locals())


def bert_large(
    operator: str | Operator = DEFAULT,
    *,
    head: str = "words",
    vocabulary: int = 30522,
    positions: int = 512,
    dropout: float = 0.1,
    attention_dropout: float = 0.0,
    weights: str | Path | None = None,
) -> Bert:
    """Build BERT large, with 24 layers, 1024 channels and 16 heads, and any operator.

    The arguments are those of `bert_base`.

    Reference: Devlin et al. 2019.

    Example:
        >>> with torch.device("meta"):
        ...     counts = [sum(p.numel() for p in bert_large(head=head).parameters()) for head in ("pooled", "words")]
        >>> counts
        [335141888, 335174458]
    """
    return _build("bert_large", channels=1024, layers=24, heads=16, **locals())


def bert_small(
    operator: str | Operator = DEFAULT,
    *,
    vocabulary: int = 8192,
    positions: int = 128,
    channels: int = 128,
    layers: int = 4,
    heads: int = 4,
    dropout: float = 0.1,
    weights: str | Path | None = None,
) -> Bert:
    """Build a BERT of any size, a small one by default, with the word head.

    The arguments are those of `Bert` and of `bert_base`.

    Example:
        >>> sum(parameter.numel() for parameter in bert_small("softmax").parameters())
        1883520
    """
    return _build("bert_small", **locals())


def _build(model: str, *, weights: str | Path | None, **arguments: Any) -> Bert:
    net = Bert(model, **arguments)
    return net if weights is None else fill_from_file(net, Path(weights))
