"""Indices: what they find, that an interrupted build goes on, and that what does not belong
together is refused."""

import gzip
import io
import json
import math
import random
import tarfile

import numpy as np
import pytest

from recipes.search_r1.index import bm25, dense
from recipes.search_r1.index.build import build_index
from recipes.search_r1.index.corpus import Corpus
from recipes.search_r1.index.encoder import (
    EncoderSettings,
    HashingEncoder,
    make_encoder,
    settings_of,
)
from recipes.search_r1.index.opening import make_retriever
from recipes.search_r1.index.passages import RetrievalError, RetrieverOptions
from tests.search import contents, write_corpus

ROWS = 200
HASHING = EncoderSettings("hashing:128", "", "")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with every back end, and its corpus."""
    folder = tmp_path_factory.mktemp("built")
    corpus = write_corpus(folder / "corpus.jsonl", ROWS)
    build_index(corpus, folder / "index", ("bm25", "flat", "hnsw", "ivf"), HashingEncoder(HASHING))
    return folder


def opened(built, backend, **options):
    return make_retriever(RetrieverOptions(built / "index", backend=backend, **options))


def ids(passages):
    return [passage.id for passage in passages]


# --- what is found ---


def test_every_back_end_finds_the_passage_that_is_asked_for(built, subtests):
    for backend in ["bm25", "flat", "hnsw", "ivf"]:
        with subtests.test(backend=backend):
            retriever = opened(built, backend)
            numbers = [0, 1, 57, ROWS - 1]
            for number, passages in zip(
                numbers, retriever.retrieve([contents(n) for n in numbers], 3), strict=True
            ):
                assert len(passages) == 3
                assert passages[0].id == f"p{number}" and passages[0].contents == contents(number)
                assert [p.score for p in passages] == sorted(
                    (p.score for p in passages), reverse=True
                )
            assert len(retriever) == ROWS and retriever.backend == backend


def test_bm25_scores_are_lucenes(tmp_path):
    texts = ["red red fox", "red fish", "blue whale in blue water", "green"]
    lines = [json.dumps({"id": n, "contents": text}) for n, text in enumerate(texts)]
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    build_index(tmp_path / "c.jsonl", tmp_path / "index")
    (found,) = make_retriever(RetrieverOptions(tmp_path / "index")).retrieve(["red foxes"], 4)
    lengths = [3, 2, 4, 1]  # "in" is a stop word
    mean = sum(lengths) / 4

    def part(tf, length, df):
        idf = math.log(1 + (4 - df + 0.5) / (df + 0.5))
        return idf * tf / (tf + 0.9 * (1 - 0.4 + 0.4 * length / mean))

    expected = {"0": part(2, 3, 2) + part(1, 3, 1), "1": part(1, 2, 2)}
    assert {p.id: p.score for p in found} == pytest.approx(expected, rel=1e-6)
    assert ids(found) == ["0", "1"]


def test_bm25_finds_nothing_where_no_word_is_shared_and_says_so_with_an_empty_list(built):
    queries = ["", "   ", "the of and", "zzzz qqqq", "?!", "\x00\ud800", "日本"]
    assert opened(built, "bm25").retrieve(queries, 5) == [[]] * len(queries)


def test_flat_is_the_exact_inner_product_and_the_others_agree(built):
    queries = [
        f"which {contents(n).split()[3]} lies in district {n % 7}" for n in range(0, ROWS, 3)
    ]
    encoder = HashingEncoder(HASHING)
    stored = encoder.encode([contents(n) for n in range(ROWS)], "")
    products = encoder.encode(queries, "") @ stored.T
    flat = opened(built, "flat")
    for row, passages in zip(products, flat.retrieve(queries, 5), strict=True):
        best = np.sort(row)[::-1][:5]
        assert [p.score for p in passages] == pytest.approx(best.tolist(), abs=1e-6)
        assert all(row[int(p.id[1:])] == pytest.approx(p.score, abs=1e-6) for p in passages)
    vectors = encoder.encode(queries, "")
    exact = flat.search(vectors, 10)[0]
    for backend, options in (("hnsw", {}), ("ivf", {"nprobe": 1000})):
        assert opened(built, backend, **options).search(vectors, 10)[0] == pytest.approx(
            exact, abs=1e-6
        )


# --- building ---


def test_a_packed_corpus_is_the_same_corpus(built, tmp_path):
    """As the published file is: a tar archive, gzipped."""
    plain, packed = (built / "corpus.jsonl").read_bytes(), tmp_path / "corpus.jsonl.gz"
    with tarfile.open(packed, "w:gz") as archive:
        member = tarfile.TarInfo("somewhere/corpus.jsonl")
        member.size = len(plain)
        archive.addfile(member, io.BytesIO(plain))
    build_index(packed, tmp_path / "index")
    for corpus in (None, packed, built / "corpus.jsonl"):
        retriever = make_retriever(RetrieverOptions(tmp_path / "index", corpus=corpus))
        assert retriever.corpus_hash == opened(built, "bm25").corpus_hash
        assert retriever.retrieve(["Entity57"], 2) == opened(built, "bm25").retrieve(
            ["Entity57"], 2
        )


class Stops(Exception):
    """The machine goes down."""


def test_an_interrupted_bm25_build_goes_on_and_ends_the_same(built, tmp_path, monkeypatch):
    monkeypatch.setattr(bm25, "CHUNK", 30)
    read = []

    def stopping(self, start=0, stop=None):
        read.append(start)
        if len(read) == 4:
            raise Stops
        return (self.row(number)["contents"] for number in range(start, stop))

    monkeypatch.setattr(Corpus, "contents", stopping)
    with pytest.raises(Stops):
        build_index(built / "corpus.jsonl", tmp_path / "index")
    for half in (tmp_path / "index" / "bm25").glob("reading.[slw]*"):
        with open(half, "ab") as file:
            file.write(b"half a chunk")
    build_index(built / "corpus.jsonl", tmp_path / "index")
    assert read == [0, 30, 60, 90, 90, 120, 150, 180]
    assert not list((tmp_path / "index" / "bm25").glob("reading.*"))
    queries = [contents(n) for n in range(0, ROWS, 7)]
    resumed = make_retriever(RetrieverOptions(tmp_path / "index"))
    assert resumed.retrieve(queries, 5) == opened(built, "bm25").retrieve(queries, 5)


class Counting(HashingEncoder):
    """Hashing that stops before its n-th call and counts the texts."""

    def __init__(self, stop_at=None):
        super().__init__(HASHING)
        self.calls, self.texts, self.stop_at = 0, 0, stop_at

    def encode(self, texts, prefix):
        self.calls += 1
        if self.calls == self.stop_at:
            raise Stops
        self.texts += len(texts)
        return super().encode(texts, prefix)


def test_an_interrupted_encoding_goes_on_and_repeats_nothing(built, tmp_path, monkeypatch):
    monkeypatch.setattr(dense, "CHUNK", 30)
    first, second = Counting(stop_at=4), Counting()
    with pytest.raises(Stops):
        build_index(built / "corpus.jsonl", tmp_path / "index", ["flat"], first)
    with open(tmp_path / "index" / "vectors.f32", "ab") as file:
        file.write(b"half a row")
    build_index(built / "corpus.jsonl", tmp_path / "index", ["flat", "hnsw"], second)
    assert (first.texts, second.texts) == (90, ROWS - 90)
    assert (tmp_path / "index" / "vectors.f32").read_bytes() == (
        built / "index" / "vectors.f32"
    ).read_bytes()
    third = Counting()
    build_index(built / "corpus.jsonl", tmp_path / "index", ["flat", "hnsw"], third)
    assert third.calls == 0


def test_a_bad_line_is_named(tmp_path):
    good = json.dumps({"id": 1, "contents": "a"})
    for line, said in (
        ("not json", "not {id"),
        ('{"id": "x", "contents": 3}', "id must be text"),
        ("", "not {id"),
    ):
        (tmp_path / "c.jsonl").write_text(f"{good}\n{line}\n{good}\n")
        with pytest.raises(RetrievalError, match=f"line 2: {said}"):
            build_index(tmp_path / "c.jsonl", tmp_path / "index")


# --- what does not belong together ---


def copied(built, tmp_path, backends=("flat",)):
    """A corpus and an index of one's own, to spoil."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes((built / "corpus.jsonl").read_bytes())
    build_index(corpus, tmp_path / "index", backends, HashingEncoder(HASHING))
    return corpus


def test_a_corpus_that_changed_is_refused_also_where_its_size_did_not(built, tmp_path):
    corpus = copied(built, tmp_path)
    options = RetrieverOptions(tmp_path / "index")
    make_retriever(options)
    text = corpus.read_text()
    corpus.write_text(text.replace("harbour", "seaport"))
    with pytest.raises(RetrievalError, match="the same size but other text"):
        make_retriever(options)
    corpus.write_text(text + text)
    with pytest.raises(RetrievalError, match=r"\d+ bytes, \d+ were indexed"):
        make_retriever(options)
    corpus.unlink()
    with pytest.raises(RetrievalError, match="is not there; name it with corpus="):
        make_retriever(options)


def test_another_encoder_than_the_index_s_is_refused(built, subtests):
    for spoiled in [{"passage_prefix": "passage: "}, {"max_length": 4}, {"encoder": "hashing:64"}]:
        mismatch = pytest.raises(RetrievalError, match="has cosine|vectors of 128 numbers")
        with subtests.test(spoiled=spoiled), mismatch:
            opened(built, "flat", **spoiled)


def test_a_faiss_file_from_elsewhere_is_searched_and_checked(built, tmp_path, subtests):
    given = {"encoder": "hashing:128", "query_prefix": "", "passage_prefix": ""}
    for backend in ["flat", "hnsw", "ivf"]:
        with subtests.test(backend=backend):
            place = tmp_path / backend
            place.mkdir()
            file, corpus = place / "e5.index", place / "wiki.jsonl.gz"
            file.write_bytes((built / "index" / f"{backend}.faiss").read_bytes())
            corpus.write_bytes(gzip.compress((built / "corpus.jsonl").read_bytes()))
            for _ in range(2):  # the second time the corpus is unpacked already
                retriever = make_retriever(RetrieverOptions(file, corpus=corpus, **given))
                assert retriever.backend == backend
                assert retriever.retrieve(["Entity3"], 3) == opened(built, backend).retrieve(
                    ["Entity3"], 3
                )
    with pytest.raises(RetrievalError, match="needs corpus and encoder as well"):
        make_retriever(RetrieverOptions(tmp_path / "flat/e5.index"))
    lines = (built / "corpus.jsonl").read_text().splitlines(keepends=True)
    for number, (rows, said) in enumerate(
        (
            (lines[:-1], f"{ROWS} vectors, the corpus has {ROWS - 1} rows"),
            (lines[::-1], "row 0 of the corpus"),
        )
    ):
        file, corpus = tmp_path / f"{number}.index", tmp_path / f"{number}.jsonl"
        file.write_bytes((built / "index" / "flat.faiss").read_bytes())
        corpus.write_text("".join(rows))
        with pytest.raises(RetrievalError, match=said):
            make_retriever(RetrieverOptions(file, corpus=corpus, **given))


def test_what_is_missing_is_said(built, tmp_path):
    with pytest.raises(RetrievalError, match="no index is there; build one with"):
        make_retriever(RetrieverOptions(tmp_path))
    with pytest.raises(RetrievalError, match="say which back end"):
        make_retriever(RetrieverOptions(built / "index"))
    with pytest.raises(RetrievalError, match="must be one of"):
        opened(built, "lucene")
    copied(built, tmp_path)
    with pytest.raises(RetrievalError, match="it holds flat; add --backend bm25"):
        make_retriever(RetrieverOptions(tmp_path / "index", backend="bm25"))
    (tmp_path / "index" / "flat.faiss").write_bytes(b"junk")
    with pytest.raises(RetrievalError, match="faiss cannot read it"):
        make_retriever(RetrieverOptions(tmp_path / "index"))


# --- encoders ---


@pytest.fixture(scope="module")
def tiny_bert(tmp_path_factory):
    """A random encoder over a vocabulary of words."""
    transformers = pytest.importorskip("transformers")
    import torch

    folder = tmp_path_factory.mktemp("bert")
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "query",
        "passage",
        ":",
        "red",
        "blue",
        "fox",
        "whale",
        "sea",
    ]
    (folder / "vocab.txt").write_text("\n".join(words))
    tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"))
    size = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    config = transformers.BertConfig(vocab_size=len(words), max_position_embeddings=32, **size)
    torch.manual_seed(3)
    transformers.BertModel(config).save_pretrained(folder / "encoder")
    tokenizer.save_pretrained(folder / "encoder")
    return folder


def test_mean_pooling_leaves_padding_out_and_prefixes_count(tiny_bert):
    import torch
    from transformers import AutoModel, AutoTokenizer

    settings = settings_of(str(tiny_bert / "encoder"))
    assert (settings.query_prefix, settings.passage_prefix, settings.pooling) == (
        "query: ",
        "passage: ",
        "mean",
    )
    encoder = make_encoder(settings)
    texts = ["red fox", "blue", "red blue fox whale sea fox", "sea whale"]
    together = encoder.encode(texts, "query: ")
    assert together.shape == (4, 16) and together.dtype == np.float32
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert / "encoder")
    model = AutoModel.from_pretrained(tiny_bert / "encoder").eval()
    for text, vector in zip(texts, together, strict=True):
        with torch.no_grad():
            hidden = model(**tokenizer(f"query: {text}", return_tensors="pt")).last_hidden_state[0]
        mean = hidden.mean(0).numpy()
        assert vector == pytest.approx(mean / np.linalg.norm(mean), abs=1e-5)
    assert np.abs(encoder.encode(texts, "passage: ") - together).max() > 1e-3
    first = make_encoder(EncoderSettings(str(tiny_bert / "encoder"), pooling="cls")).encode(
        texts, "query: "
    )
    assert np.abs(first - together).max() > 1e-3


# --- a flat index ---

WORDS = [f"w{number}" for number in range(60)]


@pytest.fixture(scope="module")
def ties(tmp_path_factory):
    """An index of 4,500 passages (five blocks), in which each text stands several times, far apart:
    exact ties."""
    folder, rng = tmp_path_factory.mktemp("ties"), random.Random(1)
    texts = [" ".join(rng.choices(WORDS, k=24)) for _ in range(700)]
    rows = [{"id": str(number), "contents": f'"T"\n{rng.choice(texts)}'} for number in range(4500)]
    (folder / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_index(
        folder / "c.jsonl",
        folder / "index",
        ("flat", "hnsw"),
        HashingEncoder(EncoderSettings("hashing:768")),
    )
    return folder / "index"


def test_an_answer_depends_neither_on_the_batch_nor_on_threads(ties):
    """A matrix product's last bits do: with 256 queries at once and with one, by one thread and by
    two."""
    one, two = (
        make_retriever(RetrieverOptions(ties, backend="flat", threads=threads))
        for threads in (1, 2)
    )
    many = [" ".join(random.Random(number).choices(WORDS, k=9)) for number in range(256)]
    together = one.retrieve(many, 5)
    assert together == two.retrieve(many, 5) == [two.retrieve([query], 5)[0] for query in many]
