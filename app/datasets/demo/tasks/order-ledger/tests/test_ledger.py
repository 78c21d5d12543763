"""Do the books add up again, and is everything else as it was?"""

import sqlite3

import pytest


@pytest.fixture()
def db():
    connection = sqlite3.connect("shop.db", isolation_level=None)
    yield connection
    if connection.in_transaction:
        connection.execute("ROLLBACK")
    connection.close()


def expected_lines(number):
    lines = [(f"article-{number % 7}", 1 + number % 3, 250 + 10 * number), ("shipping", 1, 490)][: 1 + number % 2]
    return [(number, *line) for line in lines]


def test_every_order_is_there_once(db):
    found = db.execute("SELECT id, external_ref, customer_id FROM orders ORDER BY id").fetchall()
    assert found == [(n, f"R-{1000 + n}", 1 + n % 4) for n in range(1, 41)] + [(41, "R-1041", 2)]


def test_exactly_the_lines_of_real_orders_are_left(db):
    found = db.execute("SELECT order_id, article, quantity, price_cents FROM order_lines ORDER BY id").fetchall()
    assert found == [line for number in range(1, 41) for line in expected_lines(number)]


def test_totals_are_the_sums_of_the_lines(db):
    found = dict(db.execute("SELECT id, total_cents FROM orders"))
    assert found == {n: sum(line[2] * line[3] for line in expected_lines(n)) for n in range(1, 41)} | {41: 0}


def test_customers_are_untouched(db):
    assert [name for (name,) in db.execute("SELECT name FROM customers ORDER BY id")] == ["Ada", "Grace", "Edsger", "Barbara"]


def test_the_database_refuses_a_second_import(db):
    db.execute("BEGIN")
    with pytest.raises(sqlite3.IntegrityError):
        db.execute("INSERT INTO orders (external_ref, customer_id, total_cents) VALUES ('R-1005', 1, 0)")


def test_the_database_still_takes_a_new_order(db):
    db.execute("BEGIN")
    db.execute("INSERT INTO orders (external_ref, customer_id, total_cents) VALUES ('R-2000', 1, 0)")
