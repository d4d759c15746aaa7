"""A small corpus in memory, and its preparation."""

import random
from collections.abc import Iterator
from pathlib import Path

from aamoe_jax import data
from aamoe_jax.config import DataConfig
from aamoe_jax.data.corpora import Corpus, Split

Documents = dict[Split, list[tuple[str, bytes]]]

ALIGN = 8
SEQ_LEN = 32


def random_documents(seed: int = 0, train: int = 12, held_out: int = 3, longest: int = 200) -> Documents:
    """Texts of 1 to `longest` letters; lengths around multiples of ALIGN are among them."""
    generator = random.Random(seed)

    def texts(split: str, count: int) -> list[tuple[str, bytes]]:
        lengths = [ALIGN - 1, ALIGN, 1] + [generator.randint(1, longest) for _ in range(count - 3)]
        return [(f"{split}/{i}", bytes(generator.choices(range(256), k=n))) for i, n in enumerate(lengths)]

    # Letters only, so that the text is UTF-8, and a first letter that makes every document unique.
    plain = {split: texts(split, n) for split, n in (("train", train), ("validation", held_out), ("test", held_out))}
    unique = iter(range(0x4E00, 0x9FFF))
    return {
        split: [(name, chr(next(unique)).encode() + bytes(97 + byte % 26 for byte in text)) for name, text in items]
        for split, items in plain.items()
    }


def memory_corpus(documents: Documents, name: str = "tiny") -> Corpus:
    def read(split: Split) -> Iterator[tuple[str, bytes]]:
        yield from documents[split]

    return Corpus(name, "documents of a test", "none", read)


def prepared(folder: Path, documents: Documents, name: str = "tiny", seq_len: int = SEQ_LEN) -> DataConfig:
    """A config whose only dataset is these documents, in bytes."""
    data.prepare(
        memory_corpus(documents, name), data_dir=str(folder), tokenizer=data.ByteTokenizer(), document_align=ALIGN
    )
    return DataConfig(mixture=((name, 1.0),), data_dir=str(folder), seq_len=seq_len, document_align=ALIGN)
