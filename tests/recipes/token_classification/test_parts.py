"""The recipe's parts: what is read and refused, tags from spans, and the metrics against plain references."""

from __future__ import annotations

import json
import random
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sklearn.metrics import f1_score

from samestep.errors import MissingExtraError, TaskError

pytestmark = pytest.mark.usefixtures("recipe")


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "train.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def document(text: str, *annotations: Any) -> dict[str, Any]:
    return {"text": text, "annotations": list(annotations)}


def test_all_mistakes_of_a_file_are_listed_with_their_lines(tmp_path: Path) -> None:
    from documents import TYPES, read_documents

    path = written(
        tmp_path,
        document("Ada knows SQL", [0, 3, "NAME"]),
        document("Ada knows SQL", [10, 13, "SKIL"]),
        document("Ada", [1, 4, "NAME"]),
        document("Ada", [2, 2, "NAME"]),
        document("Ada Lor", [0, 7, "NAME"], [4, 7, "SKILL"]),
        document("Ada  ", [3, 5, "NAME"]),
        document("Ada", [0, "3", "NAME"]),
        {"words": []},
        document("Ada", [True, 3, "NAME"]),
    )
    with pytest.raises(TaskError) as refused:
        read_documents(path, TYPES)
    message = str(refused.value)
    assert f"{path} has 8 mistakes" in message
    assert "line 2: has the annotation [10, 13, 'SKIL']" in message
    assert "did you mean SKILL?" in message
    assert "line 3: has the annotation [1, 4, 'NAME'], and its text the characters 0 to 3" in message
    assert "line 4: " in message
    assert "line 5: has annotations that overlap, [0, 7, 'NAME'] and [4, 7, 'SKILL']" in message
    assert "line 6: has the annotation [3, 5, 'NAME'], which holds blanks only" in message
    assert "line 7: has the annotation [0, '3', 'NAME']: write [start, end, type]" in message
    assert "line 8: is no document" in message


def test_what_is_not_there_is_named_with_what_makes_it(tmp_path: Path, data: Path) -> None:
    from documents import TYPES, read_documents
    from task import Entities

    with pytest.raises(TaskError, match=r"there is no folder none, which params\.data names: made_up"):
        Entities(data="none").prepare_data()
    with pytest.raises(TaskError, match=r"valid\.jsonl cannot be read: No such file"):
        read_documents(tmp_path / "valid.jsonl", TYPES)
    written(tmp_path, document("Ada"))
    with pytest.raises(TaskError, match=r"there is no tokenizer in .*: wordpiece\.py"):
        Entities(data=str(tmp_path)).train_data()
    missing = str(tmp_path / "no-model")
    with pytest.raises(TaskError, match=r"params\.checkpoint: '.*no-model' cannot be loaded; give a folder"):
        Entities(data=str(data), checkpoint=missing).prepare_data()
    with pytest.raises(TaskError, match="give each type of entity once"):
        Entities(types=["A", "A"])


def test_transformers_is_imported_late_and_its_extra_named(monkeypatch: pytest.MonkeyPatch, data: Path) -> None:
    from task import Entities

    monkeypatch.setitem(sys.modules, "transformers", None)
    task = Entities(data=str(data))
    with pytest.raises(MissingExtraError, match=r"pip install '.\[text\]'"):
        task.train_data()


def test_made_up_documents_follow_from_the_seed_and_have_all_types() -> None:
    from documents import TYPES
    from made_up import make_documents

    made = make_documents(30, 7)
    assert made == make_documents(30, 7)
    assert made != make_documents(30, 8)
    assert {span.type for one in made for span in one.spans} == set(TYPES)
    inside = [one.text[span.start : span.end] for one in made for span in one.spans]
    assert all(text == text.strip() != "" for text in inside)


class Characters:
    """A tokenizer as DeBERTa's: a blank belongs to the token behind it."""

    is_fast = True

    def num_special_tokens_to_add(self) -> int:
        return 2

    def __call__(self, text: str, add_special_tokens: bool = True, **options: Any) -> dict[str, Any]:
        starts = [n for n, c in enumerate(text) if n == 0 or c == " " or text[n - 1] == "-"]
        offsets = list(zip(starts, [*starts[1:], len(text)], strict=True))
        ends = [(0, 0)] if add_special_tokens else []
        return {
            "offset_mapping": [*ends, *offsets, *ends],
            "special_tokens_mask": [*[1 for _ in ends], *[0] * len(offsets), *[1 for _ in ends]],
            "input_ids": [*[0 for _ in ends], *range(1, len(offsets) + 1), *[0 for _ in ends]],
        }


def encoded(text: str, *spans: Any, max_length: int = 50) -> list[list[str]]:
    """The tags of each sample; a dash for what is ignored."""
    from documents import Document, Span
    from tags import Encoder, labels_of

    labels = labels_of(["NAME", "SKILL"])
    encoder = Encoder(Characters(), labels, max_length)
    samples = encoder.samples([Document(text, tuple(Span(*span) for span in spans))])
    return [[labels[number] if number >= 0 else "-" for number in one.labels] for one in samples]


def test_tags_begin_and_continue_and_special_tokens_have_none() -> None:
    assert encoded("Ada Lor knows SQL Go", (0, 7, "NAME"), (14, 17, "SKILL"), (18, 20, "SKILL")) == [
        ["-", "B-NAME", "I-NAME", "O", "B-SKILL", "B-SKILL", "-"]
    ]


def test_an_entity_that_would_be_lost_is_refused() -> None:
    with pytest.raises(TaskError, match=r"the entity 'QL', \[5, 7, 'SKILL'\].* has no token of its own"):
        encoded("Ada SQL", (4, 5, "SKILL"), (5, 7, "SKILL"))


def test_long_documents_are_cut_before_words_and_never_inside_of_an_entity() -> None:
    text = "a b c Ada Lor x-y z"
    assert encoded(text, (6, 13, "NAME"), max_length=6) == [
        ["-", "O", "O", "O", "-"],
        ["-", "B-NAME", "I-NAME", "O", "O", "-"],
        ["-", "O", "-"],
    ]
    with pytest.raises(TaskError, match=r"params\.max_length = 4 tokens without a place to cut"):
        encoded(text, (6, 15, "NAME"), max_length=4)


def test_parts_of_a_document_are_in_one_fold(data: Path) -> None:
    from task import Entities

    whole, cut = Entities(data=str(data)), Entities(data=str(data), max_length=24)
    samples, parts = whole.train_data(), cut.train_data()
    assert whole.fold_groups(samples) is None
    assert cut.fold_groups(parts) == parts.documents
    assert len(parts) > len(samples) == 48
    assert set(whole.fold_labels(samples)[0]) <= set(whole._types)


def test_a_tokenizer_without_offsets_is_refused_and_not_taken_for_no_entities() -> None:
    from tags import Encoder

    with pytest.raises(TaskError, match="does not tell where in the text its tokens are"):
        Encoder(SimpleNamespace(is_fast=False), ["O"], 10)


def test_the_trained_tokenizer_covers_entities_and_is_the_same_again(data: Path, tmp_path: Path) -> None:
    from documents import TYPES, read_documents
    from task import Entities
    from wordpiece import train_tokenizer

    for name in ("train.jsonl", "valid.jsonl"):
        (tmp_path / name).write_bytes((data / name).read_bytes())
    again = train_tokenizer(tmp_path, 300)
    for path in (data / "tokenizer").iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes()
    task = Entities(data=str(data))
    for one, sample in zip(read_documents(data / "valid.jsonl", TYPES), task.valid_data(), strict=True):
        kept = [place for place, label in enumerate(sample.labels) if label >= 0]
        assert len(kept) == len(sample.labels) - 2
        found = task._annotations(torch.tensor(sample.labels), torch.tensor(sample.labels), sample.offsets)
        assert found == [list(span) for span in one.spans]


def random_tags(rng: random.Random, labels: list[str]) -> list[str]:
    return [rng.choice(labels) for _ in range(rng.randint(0, 7))]


def spans_by_definition(tags: list[str]) -> set[tuple[int, int, str]]:
    """Every stretch of tokens, asked whether it is an entity."""
    found = set()
    for start in range(len(tags)):
        for end in range(start + 1, len(tags) + 1):
            kind = tags[start][2:]
            same = all(tag == f"I-{kind}" for tag in tags[start + 1 : end])
            continued = start > 0 and tags[start] == f"I-{kind}" and tags[start - 1][2:] == kind
            ends = end == len(tags) or tags[end] != f"I-{kind}"
            if kind and same and ends and not continued:
                found.add((start, end, kind))
    return found


def test_entities_of_tags_are_those_of_the_definition() -> None:
    from tags import entities_of, labels_of

    assert entities_of(["B-A", "I-A", "B-A", "I-B", "O", "I-A"]) == [(0, 2, "A"), (2, 3, "A"), (3, 4, "B"), (5, 6, "A")]
    rng = random.Random(0)
    for _ in range(500):
        tags = random_tags(rng, labels_of(["A", "B"]))
        assert set(map(tuple, entities_of(tags))) == spans_by_definition(tags), tags


def test_metrics_are_those_of_the_whole_set_however_it_is_dealt_out() -> None:
    from entity_metrics import EntityF1, PerEntity, TokenMacroF1
    from tags import IGNORED, labels_of

    types, rng = ["AB", "B", "UNUSED"], random.Random(1)
    labels = labels_of(types)
    true = torch.tensor([[rng.choice([0, 1, 2, 3, 4]) for _ in range(9)] for _ in range(40)])
    predicted = torch.where(torch.rand(true.shape, generator=torch.manual_seed(0)) < 0.7, true, 1)
    true[::3, 6:] = IGNORED
    rows = [
        ([labels[n] for n in p[t != IGNORED]], [labels[n] for n in t[t != IGNORED]])
        for p, t in zip(predicted, true, strict=True)
    ]
    mine = {(at, *span) for at, (p, _) in enumerate(rows) for span in spans_by_definition(p)}
    there = {(at, *span) for at, (_, t) in enumerate(rows) for span in spans_by_definition(t)}
    kept = true != IGNORED
    tokens = f1_score(true[kept], predicted[kept], average="macro")
    for cuts in ([0, 40], [0, 7, 8, 31, 40]):
        token, entity, table = TokenMacroF1(types), EntityF1(types), PerEntity(types)
        for start, end in pairwise(cuts):
            for whole in (token, entity, table):
                part = type(whole)(types)
                part.update(predicted[start:end], true[start:end])
                whole.merge(part)
        assert token.compute() == pytest.approx(tokens, abs=1e-12)
        both = len(mine & there)
        assert entity.compute() == pytest.approx(2 * both / (len(mine) + len(there)), abs=1e-12)
        found = table.compute()
        assert list(found) == types
        its = [{span for span in spans if span[3] == "AB"} for spans in (mine & there, mine, there)]
        right, guessed, real = map(len, its)
        assert found["AB"] == pytest.approx(
            {"precision": right / guessed, "recall": right / real, "f1": 2 * right / (guessed + real), "support": real}
        )
        assert found["UNUSED"] == {"precision": 0, "recall": 0, "f1": 0, "support": 0}


def test_dropout_reaches_the_model(data: Path) -> None:
    from task import Entities

    for task, wanted in ((Entities(data=str(data), dropout=0.3), 0.3), (Entities(data=str(data)), 0.1)):
        rates = {m.p for m in task.model().modules() if isinstance(m, torch.nn.Dropout)}
        assert rates == {0.0, wanted}
