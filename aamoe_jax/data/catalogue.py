"""Text out of the TFDS catalogue, such as `tfds:pg19`, once somebody has prepared it as array_record.

Reading needs no TensorFlow. Preparing PG-19 does (it lies in a Google bucket), and nothing here touches the network.
"""

import functools
from collections.abc import Iterator
from typing import Any

import tensorflow_datasets as tfds

from aamoe_jax.data.corpora import Corpus, Split
from aamoe_jax.data.errors import DataError, shown

PREFIX = "tfds:"
TEXT_FEATURE = {
    "pg19": "book_text",
    "scientific_papers/arxiv": "article",
    "scientific_papers/pubmed": "article",
}
"""The feature that holds the document. A set belongs here if it has one, and train, validation and test splits."""


def catalogue_corpus(name: str, tfds_dir: str) -> Corpus:
    """The corpus `tfds:NAME`, with the splits of its authors."""
    dataset = name.removeprefix(PREFIX)
    if dataset not in TEXT_FEATURE:
        raise DataError(
            f"{name!r}: the text feature of this dataset is not known; there are {', '.join(TEXT_FEATURE)}. Add a line "
            "'NAME': 'FEATURE' to TEXT_FEATURE in aamoe_jax/data/catalogue.py"
        )
    return Corpus(
        name=name,
        description=f"TFDS catalogue: {dataset}, feature {TEXT_FEATURE[dataset]}",
        licence=f"see https://www.tensorflow.org/datasets/catalog/{dataset.split('/')[0]}",
        read=functools.partial(_documents, dataset, tfds_dir),
    )


def _documents(dataset: str, tfds_dir: str, split: Split) -> Iterator[tuple[str, bytes]]:
    records = _open(dataset, tfds_dir, split)
    for number in range(len(records)):
        try:
            text = records[number][TEXT_FEATURE[dataset]]
        except Exception as error:  # whatever the reader makes of damage
            raise DataError(
                f"tfds:{dataset}: record {number} of {split} in {tfds_dir!r} cannot be read ({shown(repr(error))}); "
                "build it again"
            ) from error
        yield f"{split}/{number}", text if isinstance(text, bytes) else text.encode()


def _open(dataset: str, tfds_dir: str, split: Split) -> Any:
    # Without a format TFDS looks for its default, which only TensorFlow reads.
    settings = {"file_format": "array_record"}
    try:
        return tfds.data_source(dataset, split=split, data_dir=tfds_dir, download=False, builder_kwargs=settings)
    except Exception as error:  # absent, in another format, or damaged: all of them in many ways
        raise DataError(
            f"tfds:{dataset} is not there as array_record in {tfds_dir!r}: {shown(error)}. Prepare it "
            "where there is network (and TensorFlow, for pg19) with `tfds build "
            f"{dataset} --file_format=array_record --data_dir=DIR`, and name DIR with --tfds_dir"
        ) from error
