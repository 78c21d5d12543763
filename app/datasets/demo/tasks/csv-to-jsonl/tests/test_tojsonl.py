"""Does the command do what the instruction asks for?"""

import json
import subprocess
import sys

import pytest


def run(*arguments, text=None):
    given = text.encode() if text is not None else b""
    return subprocess.run(
        [sys.executable, "tojsonl.py", *arguments], input=given, capture_output=True, timeout=30
    )


def records(*arguments, text=None):
    done = run(*arguments, text=text)
    assert done.returncode == 0, done.stderr.decode()
    return [json.loads(line) for line in done.stdout.decode().splitlines()]


def test_a_file_becomes_typed_records():
    assert records("samples/products.csv") == [
        {"id": 1, "name": "Kettle", "price": 24.9, "in_stock": True},
        {"id": 2, "name": "Mug, blue", "price": 6.5, "in_stock": False},
        {"id": 3, "name": "Straße", "price": None, "in_stock": None},
    ]


def test_quotes_and_line_breaks_survive():
    assert records("samples/notes.csv") == [{"code": "007", "note": "two\nlines"}, {"code": 42, "note": 'say "hi"'}]


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_standard_input_is_read(arguments):
    assert records(*arguments, text="a,b\n1,x\n") == [{"a": 1, "b": "x"}]


def test_columns_choose_and_order():
    done = run("--columns", "price,id", "samples/products.csv")
    assert done.stdout.decode().splitlines()[0] == '{"price": 24.9, "id": 1}'


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("-12", -12),
        ("0", 0),
        ("-0.5", -0.5),
        ("2.50", 2.5),
        ("1e3", 1000.0),
        ("007", "007"),
        ("-007", "-007"),
        (" 5", " 5"),
        ("nan", "nan"),
        ("inf", "inf"),
        ("1_000", "1_000"),
        ("True", True),
        ('"12"', 12),
    ],
)
def test_a_field_gets_its_type(field, value):
    (record,) = records(text=f"a,b\n{field},x\n")
    assert record == {"a": value, "b": "x"}
    assert type(record["a"]) is type(value)


def test_letters_are_not_escaped_and_a_byte_order_mark_is_ignored():
    done = run(text="\ufeffname\nÅse\n")
    assert done.stdout.decode() == '{"name": "Åse"}\n'


def test_an_unknown_column_is_named():
    done = run("--columns", "id,colour", "samples/products.csv")
    assert (done.returncode, done.stdout) == (65, b"")
    assert b"colour" in done.stderr


def test_a_ragged_record_is_named_by_its_line():
    done = run(text='a,b\n1,"x\ny"\n2\n3,z\n')
    assert done.returncode == 66
    assert b"4" in done.stderr
    assert [json.loads(line) for line in done.stdout.decode().splitlines()] == [{"a": 1, "b": "x\ny"}]
