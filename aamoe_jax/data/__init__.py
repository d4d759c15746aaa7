"""Corpora, tokenizers, windows, batches. A dataset is prepared once (launch.prepare) and read by position."""

from aamoe_jax.data.batches import evaluation_batches, iterate, training_batches
from aamoe_jax.data.builder import ensure_prepared, open_corpus, prepare
from aamoe_jax.data.corpora import SPLITS, survey
from aamoe_jax.data.errors import DataError
from aamoe_jax.data.own_text import text_corpus
from aamoe_jax.data.stream import Stream, dataset_metadata, documents_of
from aamoe_jax.data.tokenizers import ByteTokenizer, SentencePieceTokenizer, load_tokenizer, train_sentencepiece
from aamoe_jax.data.windows import WindowSource, to_example

__all__ = [
    "SPLITS",
    "ByteTokenizer",
    "DataError",
    "SentencePieceTokenizer",
    "Stream",
    "WindowSource",
    "dataset_metadata",
    "documents_of",
    "ensure_prepared",
    "evaluation_batches",
    "iterate",
    "load_tokenizer",
    "open_corpus",
    "prepare",
    "survey",
    "text_corpus",
    "to_example",
    "train_sentencepiece",
    "training_batches",
]
