"""Classifiers of texts as plain torch models. They take tokens (N, length), of which 0 is padding, as `datasets` has
them; texts of only padding count as one empty token."""

import torch
from torch import Tensor, nn

from sparsevd.zoo.text import LENGTH, PADDING, WORDS

TOKENS = WORDS + 2  # the words of a vocabulary, padding, and words that are not in it


class TextLSTM(nn.Module):
    """An embedding, an LSTM, the largest output of each of its units over the text, and a linear layer.

    With the vocabulary of 20,000 words and 20 classes: 6,222,296 weights, all but 222,000 of them in the embedding.
    The largest outputs learn in a few epochs what the last state takes many for.
    """

    def __init__(
        self,
        classes: int,
        tokens: int = TOKENS,
        *,
        width: int = 300,
        hidden: int = 128,
        dropout: float = 0.0,
        word_dropout: float = 0.0,
    ):
        super().__init__()
        self.embedding = _embedding(tokens, width)
        self.word_dropout = nn.Dropout1d(word_dropout)  # of whole words, so that a text is known by any of them
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.dropout(self.word_dropout(self.embedding(tokens))))  # (N, length, hidden)
        padding = (tokens == PADDING).unsqueeze(-1)
        padding[:, 0] = False
        return self.head(self.dropout(outputs.masked_fill(padding, -1.0).amax(1)))  # type: ignore[no-any-return]


class TextEncoder(nn.Module):
    """An embedding of words and places, a Transformer's encoder, the mean of its outputs over the text, a linear layer.

    With the vocabulary of 20,000 words and 52 classes: 3,378,944 weights, 786,432 of them in the encoder.
    """

    def __init__(
        self,
        classes: int,
        tokens: int = TOKENS,
        *,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        length: int = LENGTH,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.embedding = _embedding(tokens, width)
        self.places = nn.Embedding(length, width)
        nn.init.normal_(self.places.weight, std=_DEVIATION)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, batch_first=True, norm_first=True, activation="gelu"
        )
        self.encoder = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == PADDING
        padding[:, 0] = False
        places = torch.arange(tokens.shape[1], device=tokens.device)
        h = self.encoder(self.dropout(self.embedding(tokens) + self.places(places)), src_key_padding_mask=padding)
        read = (~padding).unsqueeze(-1).to(h.dtype)
        return self.head(self.dropout((h * read).sum(1) / read.sum(1)))  # type: ignore[no-any-return]


# Of embeddings. Torch's own is 1: rare words would stay there at random, as large as those that have learned something,
# and have to be unlearned when weights are removed.
_DEVIATION = 0.01


def _embedding(tokens: int, width: int) -> nn.Embedding:
    embedding = nn.Embedding(tokens, width, padding_idx=PADDING)
    with torch.no_grad():
        nn.init.normal_(embedding.weight, std=_DEVIATION)
        embedding.weight[PADDING].zero_()
    return embedding
