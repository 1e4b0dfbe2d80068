"""Text and rendered conversations become the ids a tokenizer file gives, with a mask that follows the spans."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, pre_tokenizers, processors

from packhorse.errors import ConfigError
from packhorse_service.loading.tokenizer import Tokenizer, TokenizerSpec
from tests.shared_data import shared


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2's tokenizer as one JSON file, made from its two original files."""
    vocab = json.loads(shared("data/tokenizers/gpt2/encoder.json").read_text("utf-8"))
    lines = shared("data/tokenizers/gpt2/vocab.bpe").read_text("utf-8").split("\n")[1:]
    pairs = [line.split(" ") for line in lines if line]
    tokenizer = RawTokenizer(models.BPE(vocab=vocab, merges=[(left, right) for left, right in pairs]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    path = tmp_path_factory.mktemp("gpt2") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def gapped(tiny_tokenizer: Path, tmp_path: Path) -> Path:
    """A tokenizer of few ids, one of them far beyond the others."""
    content = json.loads(tiny_tokenizer.read_text("utf-8"))
    content["model"]["vocab"]["z"] = 70_000
    path = tmp_path / "gapped.json"
    path.write_text(json.dumps(content), "utf-8")
    return path


def test_documents_get_the_end_token_and_nothing_else(tiny_tokenizer: Path) -> None:
    plain = Tokenizer(TokenizerSpec(file=str(tiny_tokenizer)))
    ended = Tokenizer(TokenizerSpec(file=str(tiny_tokenizer), eos_token="<|endoftext|>"))
    ids = plain.encode("the horse é日")
    assert ids.dtype == np.uint32
    assert ended.encode("the horse é日").tolist() == [*ids.tolist(), 0]
    assert ended.encode("").tolist() == [0]


def test_gpt2_gives_the_ids_counted_elsewhere(gpt2: Path) -> None:
    tokenizer = Tokenizer(TokenizerSpec(file=str(gpt2)))
    assert tokenizer.vocab_size == 50257
    assert tokenizer.encode("Hello world").tolist() == [15496, 995]
    strings = json.loads(shared("data/odd/blns.json").read_text("utf-8"))
    counts = np.load(shared("data/lengths/blns.gpt2_plain.npy"))
    assert [len(tokenizer.encode(text)) for text in strings] == counts.tolist()


def test_an_id_is_trained_on_when_its_first_character_lies_in_a_span(gpt2: Path) -> None:
    tokenizer = Tokenizer(TokenizerSpec(file=str(gpt2)))
    text = "user:\n\nWho? bot:\n I am日本.\n\nuser"
    start, end = text.index(" I am"), text.index("user", 5)
    ids, mask = tokenizer.encode_marked(text, [(start, end)])
    raw = RawTokenizer.from_file(str(gpt2))
    raw.post_processor = processors.ByteLevel(trim_offsets=False)
    expected = [int(start <= first < end) for first, _ in raw.encode(text).offsets]
    assert ids.tolist() == raw.encode(text).ids
    assert mask.tolist() == expected
    assert 0 < sum(expected) < len(expected)


def test_no_span_trains_nothing_and_touching_spans_train_everything(tiny_tokenizer: Path) -> None:
    tokenizer = Tokenizer(TokenizerSpec(file=str(tiny_tokenizer)))
    ids, mask = tokenizer.encode_marked("the packs", [])
    assert (len(mask), mask.sum()) == (len(ids), 0)
    assert tokenizer.encode_marked("the packs", [(0, 4), (4, 9)])[1].all()
    assert tokenizer.encode_marked("", [])[0].size == 0


def test_what_a_file_says_about_cutting_padding_and_framing_is_not_applied(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    raw = RawTokenizer.from_file(str(tiny_tokenizer))
    raw.enable_truncation(4)
    raw.enable_padding(length=64)
    raw.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    raw.save(str(tmp_path / "t.json"))
    text = "a text of more than four tokens"
    plain = Tokenizer(TokenizerSpec(file=str(tiny_tokenizer))).encode(text)
    assert Tokenizer(TokenizerSpec(file=str(tmp_path / "t.json"))).encode(text).tolist() == plain.tolist()


def test_the_digest_is_that_of_the_file_and_checked_when_given(tiny_tokenizer: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.json"
    copy.write_bytes(tiny_tokenizer.read_bytes())
    digest = Tokenizer(TokenizerSpec(file=str(tiny_tokenizer))).digest
    assert len(digest) == 32
    assert Tokenizer(TokenizerSpec(file=str(copy), digest=digest)).digest == digest
    copy.write_bytes(tiny_tokenizer.read_bytes() + b"\n")
    with pytest.raises(ConfigError, match=f"expected {digest}"):
        Tokenizer(TokenizerSpec(file=str(copy), digest=digest))


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b"[1, 2]"])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"t\.json.*is not a tokenizer file"):
        Tokenizer(TokenizerSpec(file=str(path)))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json.*No such file"):
        Tokenizer(TokenizerSpec(file=str(tmp_path / "none.json")))


def test_an_unknown_special_token_is_refused_with_the_nearest(tiny_tokenizer: Path, gpt2: Path) -> None:
    with pytest.raises(ConfigError, match=r"eos_token='<\|eot\|>'.*nearest token is '<\|endoftext\|>'"):
        Tokenizer(TokenizerSpec(file=str(tiny_tokenizer), eos_token="<|eot|>"))
    with pytest.raises(ConfigError, match=r"nearest token is '<\|endoftext\|>'"):
        Tokenizer(TokenizerSpec(file=str(gpt2), eos_token="<|endoftxt|>"))


def test_a_tokenizer_with_larger_ids_than_the_model_is_refused(tiny_tokenizer: Path) -> None:
    padded = Tokenizer(TokenizerSpec(file=str(tiny_tokenizer), vocab_size=288))
    assert (padded.vocab_size, padded.id_limit) == (288, 280)
    with pytest.raises(ConfigError, match=r"vocab_size=256 must be more than the largest id of .*, 279"):
        Tokenizer(TokenizerSpec(file=str(tiny_tokenizer), vocab_size=256))


def test_the_vocabulary_of_a_contract_is_the_models_and_holds_every_id(tiny_tokenizer: Path) -> None:
    plain = Tokenizer(TokenizerSpec(file=str(tiny_tokenizer)))
    plain.require_vocabulary(280)
    with pytest.raises(
        ConfigError, match=r"contract\.vocab_size=279 must be more than the tokenizer's largest id, 279"
    ):
        plain.require_vocabulary(279)
    padded = Tokenizer(TokenizerSpec(file=str(tiny_tokenizer), vocab_size=288))
    padded.require_vocabulary(288)
    with pytest.raises(ConfigError, match=r"contract\.vocab_size=320 and tokenizer\.vocab_size=288"):
        padded.require_vocabulary(320)


def test_the_largest_id_decides_however_few_there_are(gapped: Path) -> None:
    tokenizer = Tokenizer(TokenizerSpec(file=str(gapped)))
    assert tokenizer.vocab_size == tokenizer.id_limit == 70_001
    assert 70_000 in tokenizer.encode("az").tolist()
