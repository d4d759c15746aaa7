import os
import signal
import subprocess
import sys

import pytest
import tensorflow_datasets as tfds

from aamoe_jax import data
from aamoe_jax.config import DataConfig
from aamoe_jax.data import catalogue, corpora
from aamoe_jax.data.stream import stream_dir
from tests.data.helpers import ALIGN, memory_corpus, prepared, random_documents

TOKENIZER = data.ByteTokenizer()


def prepare(folder, documents, align=ALIGN, **options):
    corpus = memory_corpus(documents)
    return data.prepare(corpus, data_dir=str(folder), tokenizer=TOKENIZER, document_align=align, **options)


def brute_force_stream(documents, align):
    tokens = []
    for _, text in documents:
        tokens += [0] * (-len(tokens) % align)
        tokens += [byte + 3 for byte in text] + [1]
    return tokens


@pytest.mark.parametrize("align", [1, ALIGN, 96, 5000])
def test_documents_start_at_multiples_of_align(tmp_path, align):
    documents = random_documents(train=40, longest=3000)
    metadata = prepare(tmp_path, documents, align)
    config = DataConfig(data_dir=str(tmp_path), document_align=align, mixture=(("tiny", 1.0),))
    assert metadata["block"] % align == 0
    for split in data.SPLITS:
        stream = data.Stream(config, "tiny", split)
        expected = brute_force_stream(documents[split], align)
        assert stream.read(0, len(stream)).tolist() == expected
        assert stream.read(5, 5000).tolist() == (expected + [0] * 5000)[5:5000], "padding past the end"


@pytest.mark.parametrize("batch", [1, 5000, 2**23])
def test_documents_come_back(tmp_path, monkeypatch, batch):
    monkeypatch.setattr(data.builder, "BATCH", batch)
    documents = random_documents(train=40, longest=3000)
    config = prepared(tmp_path, documents)
    for split in data.SPLITS:
        assert list(data.documents_of(config, "tiny", split)) == [text for _, text in documents[split]]


def test_metadata_says_what_results_must_record(tmp_path):
    documents = random_documents()
    config = prepared(tmp_path, documents)
    metadata = data.dataset_metadata(config, "tiny")
    sizes = {split: sum(len(text) for _, text in documents[split]) for split in data.SPLITS}
    counts = {split: len(documents[split]) for split in data.SPLITS}
    assert metadata["corpus_digest"] == data.survey(memory_corpus(documents)).digest
    assert metadata["bytes"] == sizes
    assert metadata["documents"] == counts
    assert metadata["tokens"] == {split: sizes[split] + counts[split] for split in data.SPLITS}, "an eos each"
    assert (metadata["tokenizer"], metadata["dtype"], metadata["document_align"]) == ("bytes", "uint16", ALIGN)


def snapshot(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_second_prepare_changes_nothing(tmp_path):
    first = prepare(tmp_path, random_documents())
    files = snapshot(tmp_path)
    assert prepare(tmp_path, random_documents()) == first
    assert snapshot(tmp_path) == files


def test_a_changed_corpus_is_told_and_can_be_replaced(tmp_path):
    prepare(tmp_path, random_documents(seed=0))
    with pytest.raises(data.DataError, match=r"another state of the corpus.*--existing=replace"):
        prepare(tmp_path, random_documents(seed=1))
    metadata = prepare(tmp_path, random_documents(seed=1), existing="replace")
    assert metadata["corpus_digest"] == data.survey(memory_corpus(random_documents(seed=1))).digest
    config = DataConfig(data_dir=str(tmp_path), document_align=ALIGN)
    expected = [text for _, text in random_documents(seed=1)["train"]]
    assert list(data.documents_of(config, "tiny", "train")) == expected


def test_other_alignments_lie_side_by_side(tmp_path):
    prepare(tmp_path, random_documents())
    prepare(tmp_path, random_documents(), align=16)
    with pytest.raises(
        data.DataError, match=r"document_align = 32: run .*--document_align=32`\. .*tiny-bytes-16, tiny-bytes-8"
    ):
        data.dataset_metadata(DataConfig(data_dir=str(tmp_path), document_align=32), "tiny")
    with pytest.raises(
        data.DataError,
        match=r"'tiny' is prepared .* for document_align = 8, 16, .* document_align = 4: run .*--document_align=4`, "
        r"or bind DataConfig\.document_align = 8\. ",
    ):
        data.dataset_metadata(DataConfig(data_dir=str(tmp_path), document_align=4), "tiny")


@pytest.mark.parametrize(("name", "meant"), [("tini", "tiny"), ("bocks", "books")])
def test_a_name_that_was_mistyped_is_told(tmp_path, name, meant):
    prepare(tmp_path, random_documents())
    config = DataConfig(data_dir=str(tmp_path), document_align=ALIGN, mixture=((name, 1.0),))
    with pytest.raises(data.DataError, match=f"{name!r} is not prepared .*did you mean {meant!r} .*: tiny-bytes-8$"):
        data.ensure_prepared(config)


def test_a_prepare_that_fails_leaves_nothing_that_looks_finished(tmp_path):
    def interrupted(split):
        yield from random_documents()[split]
        if interrupted.reads == 4:  # the survey reads all three splits first
            raise KeyboardInterrupt
        interrupted.reads += 1

    interrupted.reads = 0
    corpus = corpora.Corpus("tiny", "", "", interrupted)
    with pytest.raises(KeyboardInterrupt):
        data.prepare(corpus, data_dir=str(tmp_path), tokenizer=TOKENIZER, document_align=ALIGN)
    assert not stream_dir(str(tmp_path), "tiny", TOKENIZER, ALIGN).exists()
    prepared(tmp_path, random_documents())


def test_a_killed_prepare_leaves_nothing_that_looks_finished(tmp_path):
    program = f"""
import os, signal
from aamoe_jax import data
from tests.data.helpers import ALIGN, memory_corpus, random_documents
class Killer(data.ByteTokenizer):
    def encode(self, text):
        if text == random_documents()["test"][-1][1]:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(text)
data.prepare(memory_corpus(random_documents()), data_dir={str(tmp_path)!r}, tokenizer=Killer(), document_align=ALIGN)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, env=os.environ | {"PYTHONPATH": os.getcwd()})
    assert done.returncode == -signal.SIGKILL
    assert list(tmp_path.rglob("*.array_record*")), "it was killed in the middle of writing"
    with pytest.raises(data.DataError, match="is not prepared"):
        data.dataset_metadata(DataConfig(data_dir=str(tmp_path), document_align=ALIGN), "tiny")
    assert prepare(tmp_path, random_documents())["documents"]["train"] == 12


class TestResume:
    """What a prepare that was stopped had tokenized is not tokenized again."""

    class Interrupted:
        """Bytes as another tokenizer, which stops at the last document, the first time that it comes to it."""

        def __init__(self):
            self.seen: list[bytes] = []
            self.bytes = data.ByteTokenizer()
            for name in ("name", "digest", "vocab_size", "eos_id", "pad_id", "byte_lengths", "decode"):
                setattr(self, name, getattr(self.bytes, name))

        def encode_batch(self, texts):
            return [self.encode(text) for text in texts]

        def encode(self, text):
            self.seen.append(text)
            if text == random_documents()["test"][-1][1] and text not in self.seen[:-1]:
                raise KeyboardInterrupt
            return self.bytes.encode(text)

    @pytest.fixture
    def tokenizer(self, tmp_path, monkeypatch):
        """One batch a document; all but the last have been tokenized."""
        monkeypatch.setattr(data.builder, "BATCH", 1)
        tokenizer = self.Interrupted()
        with pytest.raises(KeyboardInterrupt):
            self.prepare(tmp_path, tokenizer)
        assert len(tokenizer.seen) == sum(map(len, random_documents().values()))
        return tokenizer

    def prepare(self, folder, tokenizer):
        corpus = memory_corpus(random_documents())
        return data.prepare(corpus, data_dir=str(folder), tokenizer=tokenizer, document_align=ALIGN)

    def test_the_rest_alone_is_tokenized(self, tokenizer, tmp_path):
        before = len(tokenizer.seen)
        metadata = self.prepare(tmp_path, tokenizer)
        assert tokenizer.seen[before:] == [random_documents()["test"][-1][1]]
        assert metadata == prepare(tmp_path / "whole", random_documents())
        for split in data.SPLITS:
            resumed, whole = (
                data.Stream(DataConfig(data_dir=str(folder), document_align=ALIGN), "tiny", split)
                for folder in (tmp_path, tmp_path / "whole")
            )
            assert resumed.read(0, len(whole)).tolist() == whole.read(0, len(whole)).tolist()
        assert not list(tmp_path.rglob("*.tokenized"))

    def test_bytes_are_not_kept(self, tmp_path, monkeypatch):
        kept = []
        monkeypatch.setattr(data.builder.TokenizedBatches, "remove", lambda self: kept.append(self._folder.exists()))
        self.prepare(tmp_path, data.ByteTokenizer())
        assert kept == [False]

    def test_a_torn_file_is_tokenized_again(self, tokenizer, tmp_path):
        before = len(tokenizer.seen)
        torn, *_ = sorted(tmp_path.rglob("*.tokenized/*"))
        torn.write_bytes(torn.read_bytes()[:-30])
        self.prepare(tmp_path, tokenizer)
        assert len(tokenizer.seen[before:]) == 2


def test_two_prepares_at_once_give_one_dataset(tmp_path):
    documents = random_documents()

    def overtaken(split):
        yield from documents[split]
        overtaken.reads += 1
        if overtaken.reads == 6:  # after the survey, at the end of writing
            prepare(tmp_path, documents)

    overtaken.reads = 0
    corpus = corpora.Corpus("tiny", "documents of a test", "none", overtaken)
    metadata = data.prepare(corpus, data_dir=str(tmp_path), tokenizer=TOKENIZER, document_align=ALIGN)
    assert metadata == prepare(tmp_path, documents)


def test_an_empty_split_is_one_clear_error(tmp_path):
    documents = random_documents() | {"validation": []}
    with pytest.raises(data.DataError, match="tiny: no documents for the split 'validation'"):
        prepare(tmp_path, documents)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("books", "aamoe prepare --domain=books --data_dir=nowhere --tokenizer=bytes --document_align=64"),
        ("tfds:pg19", "aamoe prepare --domain=tfds:pg19 --data_dir=nowhere"),
        ("mine", "aamoe prepare --text='DIR/**/*.txt' --name=mine --data_dir=nowhere"),
    ],
)
def test_a_missing_dataset_names_the_command(tmp_path, monkeypatch, name, command):
    monkeypatch.chdir(tmp_path)
    config = DataConfig(data_dir="nowhere", mixture=((name, 1.0),))
    for access in (
        lambda: data.dataset_metadata(config, name),
        lambda: data.ensure_prepared(config),
        lambda: data.training_batches(config, batch_size=1, seed=0),
        lambda: data.evaluation_batches(config, name, split="test", batch_size=1),
    ):
        with pytest.raises(data.DataError) as error:
            access()
        assert command in str(error.value)
        assert name in str(error.value)
        assert "'nowhere'" in str(error.value)


def test_an_unknown_split_is_told(tmp_path):
    config = prepared(tmp_path, random_documents())
    with pytest.raises(data.DataError, match="no split 'dev'; there are train, validation, test"):
        data.Stream(config, "tiny", "dev")


def test_code_is_prepared_on_first_use(tmp_path, monkeypatch):
    documents = random_documents()
    monkeypatch.setattr(corpora, "_code", memory_corpus(documents).read)
    config = DataConfig(data_dir=str(tmp_path))
    data.ensure_prepared(config)
    data.ensure_prepared(config)
    assert data.dataset_metadata(config, "code")["documents"]["train"] == len(documents["train"])


# --- the TFDS catalogue, mocked: no network ---------------------------------------------------------------------------


def test_a_catalogue_set_is_read_with_its_own_splits(tmp_path):
    def records(builder, split, **options):
        assert builder.info.full_name.startswith("scientific_papers/arxiv")
        return [{"article": f"{split} {i}".encode(), "abstract": b"unused"} for i in range(3)]

    name = "tfds:scientific_papers/arxiv"
    with tfds.testing.mock_data(as_data_source_fn=records):
        corpus = data.open_corpus(name, data_dir=str(tmp_path))
        documents = {split: list(corpus.read(split)) for split in data.SPLITS}
    # The mock would also keep our own dataset from being written.
    corpus = memory_corpus(documents, name)
    data.prepare(corpus, data_dir=str(tmp_path), tokenizer=TOKENIZER, document_align=ALIGN)
    config = DataConfig(data_dir=str(tmp_path), document_align=ALIGN, mixture=((name, 1.0),), seq_len=16)
    assert list(data.documents_of(config, name, "validation")) == [f"validation {i}".encode() for i in range(3)]
    assert data.training_batches(config, batch_size=2, seed=0)[0]["tokens"].shape == (2, 16)


@pytest.mark.parametrize("dataset", sorted(catalogue.TEXT_FEATURE))
def test_the_text_features_exist(tmp_path, dataset):
    with tfds.testing.mock_data(num_examples=2):
        documents = list(data.open_corpus(f"tfds:{dataset}", data_dir=str(tmp_path)).read("test"))
    assert [name for name, _ in documents] == ["test/0", "test/1"]
    assert all(text for _, text in documents)


def test_absent_and_unknown_catalogue_sets_say_what_to_do(tmp_path):
    with pytest.raises(data.DataError, match=r"TEXT_FEATURE in aamoe_jax/data/catalogue\.py"):
        data.open_corpus("tfds:mnist", data_dir=str(tmp_path))
    corpus = data.open_corpus("tfds:pg19", data_dir=str(tmp_path))
    with pytest.raises(data.DataError, match="tfds build pg19 --file_format=array_record"):
        data.survey(corpus)


def test_a_sentencepiece_stream_is_counted_in_its_bytes(tmp_path):
    documents = random_documents(train=40, longest=500)
    texts = [text for _, text in documents["train"]]
    path = tmp_path / "tiny.model"
    path.write_bytes(data.train_sentencepiece(texts, kind="bpe", vocab_size=340))
    tokenizer = data.load_tokenizer(str(path))
    metadata = data.prepare(memory_corpus(documents), data_dir=str(tmp_path), tokenizer=tokenizer, document_align=ALIGN)
    config = DataConfig(data_dir=str(tmp_path), tokenizer=str(path), document_align=ALIGN)
    stream = data.Stream(config, "tiny", "test")
    tokens = stream.read(0, len(stream))
    assert tokenizer.byte_lengths[tokens].sum() == metadata["bytes"]["test"]
    assert metadata["tokenizer_digest"] == tokenizer.digest
    assert list(data.documents_of(config, "tiny", "test")) == [text for _, text in documents["test"]]
