"""Samples from recorded calls: which tokens are the policy's, where a sequence breaks, what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import SampleRefused
from app.experience import files
from app.experience.samples import samples_of
from app.ledger.experience import EndedAttempt
from app.ledger.model_calls import StoredCall
from app.model_service.trajectory import artifact
from app.model_service.trajectory.tree import BranchKind
from app.models.model_calls import VersionSpan
from tests.unit.test_trajectory import a_call, a_conversation, said

ENDED = EndedAttempt(
    number=1,
    policy="policy",
    unusable="",
    calls_key=None,
    run_id=UUID(int=1),
    group_id=UUID(int=2),
    task_id=UUID(int=3),
    attempt_id=UUID(int=4),
    task="fix-it",
    agent="mini-swe-agent",
    reward=0.5,
    reward_parts={"graded_reward": 1.0},
    end_reason="submitted",
)


def _with_ids(
    calls: Sequence[StoredCall], prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], **values: Any
) -> list[StoredCall]:
    return [
        replace(
            call,
            prompt_token_ids=tuple(prompt),
            token_ids=tuple(answer),
            logprobs=tuple(-0.5 for _ in answer),
            policy_version="v1",
            **values,
        )
        for call, prompt, answer in zip(calls, prompts, answers, strict=True)
    ]


def test_a_conversation_is_one_sequence_with_the_policys_tokens_masked() -> None:
    calls = _with_ids(a_conversation("a", "b"), [[1, 2], [1, 2, 7, 8, 3]], [[7, 8], [9]])
    (sample,) = samples_of(calls)
    assert sample.token_ids == (1, 2, 7, 8, 3, 9)
    assert sample.mask == (False, False, True, True, False, True)
    assert sample.logprobs == (0.0, 0.0, -0.5, -0.5, 0.0, -0.5)
    assert sample.versions == (VersionSpan("v1", 2, 6),)
    assert (sample.kind, sample.part, sample.trained) == (BranchKind.MAIN, 0, 3)


def test_a_prompt_that_changed_what_was_said_begins_another_part() -> None:
    calls = _with_ids(a_conversation("a", "b"), [[1, 2], [1, 2, 7, 5, 3]], [[7, 8], [9]])
    first, second = samples_of(calls)
    assert (first.part, first.token_ids, first.mask) == (0, (1, 2, 7, 8), (False, False, True, True))
    assert (second.part, second.token_ids) == (1, (1, 2, 7, 5, 3, 9))
    assert second.mask == (False,) * 5 + (True,)


def test_versions_are_spans_where_they_change() -> None:
    calls = _with_ids(a_conversation("a", "b"), [[1], [1, 7, 3]], [[7], [9]])
    (sample,) = samples_of([calls[0], replace(calls[1], policy_version="v2")])
    assert sample.versions == (VersionSpan("v1", 1, 2), VersionSpan("v2", 3, 4))


def test_side_calls_without_tools_are_left_out() -> None:
    main = _with_ids(a_conversation("a", "b"), [[1], [1, 7, 3]], [[7], [9]])
    title = a_call([{"role": "user", "content": "give it a title"}], said("a title"), tools=())
    aside = _with_ids([title], [[50]], [[51]])
    assert [sample.kind for sample in samples_of([*main, *aside])] == [BranchKind.MAIN]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"token_ids": None}, "no token ids"),
        ({"logprobs": None}, "no log-probabilities"),
        ({"prompt_token_ids": None, "logprobs": None}, "no prompt ids and no log-probabilities"),
        ({"logprobs": (math.nan,)}, "finite"),
        ({"logprobs": (0.5,)}, "at most 0"),
        ({"logprobs": (-0.1, -0.1)}, "one log-probability for each token"),
        ({"token_ids": (-1,)}, "token ids from 0"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_by_name(values: dict[str, Any], words: str) -> None:
    (call,) = _with_ids(a_conversation("a"), [[1]], [[7]])
    with pytest.raises(SampleRefused, match=words):
        samples_of([replace(call, **values)])


def test_an_attempt_without_answers_is_refused() -> None:
    with pytest.raises(SampleRefused, match="at least one answered call"):
        samples_of([])


_ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5)


@given(turns=st.lists(st.tuples(_ids, _ids), min_size=1, max_size=5))
def test_ids_come_out_as_the_engine_gave_them(turns: list[tuple[list[int], list[int]]]) -> None:
    prompts, answers, so_far = [], [], []
    for fresh, answer in turns:
        prompts.append([*so_far, *fresh])
        answers.append(answer)
        so_far = [*prompts[-1], *answer]
    calls = _with_ids(a_conversation(*(f"t{n}" for n in range(len(turns)))), prompts, answers)
    (row,) = files.read(files.joined([files.table_of(files.write(ENDED, samples_of(calls)))]))
    assert row["token_ids"] == so_far
    assert [token for token, own in zip(row["token_ids"], row["mask"], strict=True) if own] == [
        token for answer in answers for token in answer
    ]
    (sample,) = samples_of(calls)
    assert row["logprobs"] == list(sample.logprobs)
    assert row["versions"] == [asdict(span) for span in sample.versions]
    assert dict(row["reward_parts"]) == ENDED.reward_parts


def test_a_file_of_something_else_is_refused() -> None:
    with pytest.raises(SampleRefused, match="Parquet"):
        files.read(b"nothing of the kind")


def test_weights_that_change_inside_an_answer_are_spans_of_the_sample() -> None:
    spans = [(VersionSpan("v1", 0, 1), VersionSpan("v2", 1, 3)), (VersionSpan("v2", 0, 1),)]
    calls = _with_ids(a_conversation("a", "b"), [[1, 2], [1, 2, 7, 8, 9, 3]], [[7, 8, 9], [6]])
    calls = [replace(call, versions=span) for call, span in zip(calls, spans, strict=True)]
    (sample,) = samples_of(artifact.read(artifact.export(calls)))
    assert sample.versions == (VersionSpan("v1", 2, 3), VersionSpan("v2", 3, 7))


@pytest.mark.parametrize("spans", [[(0, 1)], [(0, 1), (2, 3)], [(1, 3)], [(0, 2), (1, 3)], [(0, 4)], [(2, 3), (0, 2)]])
def test_spans_that_do_not_fit_the_answer_are_refused(spans: list[tuple[int, int]]) -> None:
    (call,) = _with_ids(a_conversation("a"), [[1]], [[7, 8, 9]])
    versions = tuple(VersionSpan("v1", start, end) for start, end in spans)
    with pytest.raises(SampleRefused, match="expected versions for tokens 0 to 3"):
        samples_of([replace(call, versions=versions)])
