"""What a recipe builds on, as an engine reads it; and the same recipe on images named by their ids."""

from __future__ import annotations

import pytest

from app.images.dockerfile import Dockerfile, expanded


def bases(text: str, **values: str) -> list[str]:
    return [base.reference for base in Dockerfile(text, values).bases]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FROM python:3.11\n", ["python:3.11"]),
        ("\ufeff  from\tpython:3.11\r\n", ["python:3.11"]),
        ("# FROM a\nFROM b # c\n", ["b"]),
        ("FROM --platform=linux/amd64 \\\n  # a word on it\n\n  a:1 \\  \nAS one", ["a:1"]),
        ("FROM a AS One\nFROM one\nCOPY --from=ONE / /\nFROM two AS two\n", ["a", "two"]),
        ("FROM scratch\nFROM a@sha256:00ff\n", ["a@sha256:00ff"]),
        ("FROM a\nCOPY --from=0 x y\nCOPY --chown=1:1 --from=b:2 x y\nADD --from=c x y\n", ["a", "b:2"]),
        ('FROM a\ncopy --from=b ["x y", "z"]\nCOPY x --from=d\n', ["a", "b"]),
        ("FROM a\nRUN echo \\\nFROM b\n", ["a"]),
        ("FROM a\nONBUILD FROM b\nLABEL x=FROM\n", ["a"]),
        ("FROM\nFROM $\nRUN\n", ["$"]),
        ("FROM a\nRUN echo $((1<<N))\nFROM b\n", ["a", "b"]),
        ("", []),
    ],
)
def test_bases_are_what_no_stage_of_the_recipe_makes(text: str, expected: list[str]) -> None:
    assert bases(text) == expected


def test_arguments_before_the_first_stage_name_bases() -> None:
    recipe = 'ARG TAG=3.11 NAME="python:${TAG}"\nARG GIVEN=x\nARG NONE\nFROM ${NAME}\nARG NAME=late\nFROM $NAME\n'
    assert bases(recipe) == ["python:3.11", "python:3.11"]
    assert bases(recipe, TAG="3.12") == ["python:3.12", "python:3.12"]
    assert bases("ARG GIVEN=x\nFROM ${GIVEN}\n", GIVEN="y:1") == ["y:1"]
    assert bases("ARG NONE\nFROM ${NONE}\nFROM ${NONE:-a:1}\nFROM ${LATE}\nARG LATE=b\n", LATE="c") == ["a:1"]


def test_what_it_declares_is_known() -> None:
    assert Dockerfile("FROM a\narg X \\\n BASE_IMAGE=1\n").takes("BASE_IMAGE")
    assert not Dockerfile("# ARG BASE_IMAGE\nFROM a\nENV BASE_IMAGE=1\n").takes("BASE_IMAGE")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("$A", "1"),
        ("x${A}y$B$A.", "x1y1."),
        ("${B:-two}${B-two}${E-two}${E:-two}", "twotwotwo"),
        ("${A:+three}${B:+three}${E+three}", "threethree"),
        ("'x'\"$A\"", "x1"),
    ],
)
def test_a_word_is_completed_as_the_engine_does(word: str, expected: str) -> None:
    assert expanded(word, {"A": "1", "E": ""}) == expected


def test_the_recipe_on_other_images_keeps_every_other_line_where_it_was() -> None:
    text = (
        "ARG V=1\n"
        "FROM --platform=linux \\\n"
        "  # a word on it\n"
        "  linux:${V} AS one\n"
        "RUN echo FROM linux:1 \\\n"
        "  && true\n"
        "COPY --chown=0:0 --from=tools \\\n"
        '  [ "/a  b", "/c" ]\n'
        "FROM one\n"
        "COPY --from=kept /x /y"
    )
    found = Dockerfile(text).on({"linux:1": "sha256:aa", "tools": "sha256:bb"})
    assert found.split("\n") == [
        "ARG V=1",
        "FROM --platform=linux sha256:aa AS one",
        "",
        "",
        "RUN echo FROM linux:1 \\",
        "  && true",
        'COPY --chown=0:0 --from=sha256:bb   [ "/a  b", "/c" ]',
        "",
        "FROM one",
        "COPY --from=kept /x /y",
    ]
    assert Dockerfile(text).on({}) == text
