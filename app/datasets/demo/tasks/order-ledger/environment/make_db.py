"""Makes the damaged database: python3 make_db.py SCHEMA DATABASE"""

import sqlite3
import sys
from pathlib import Path

schema, target = sys.argv[1:]
db = sqlite3.connect(target)
db.executescript(Path(schema).read_text())
db.executemany("INSERT INTO customers VALUES (?, ?)", [(1, "Ada"), (2, "Grace"), (3, "Edsger"), (4, "Barbara")])
for number in range(1, 41):
    lines = [(f"article-{number % 7}", 1 + number % 3, 250 + 10 * number), ("shipping", 1, 490)][: 1 + number % 2]
    total = sum(quantity * price for _, quantity, price in lines)
    # Every ninth total went wrong in the first import.
    db.execute("INSERT INTO orders VALUES (?, ?, ?, ?)", (number, f"R-{1000 + number}", 1 + number % 4, total + 5 * (number % 9 == 0)))
    db.executemany(
        "INSERT INTO order_lines (order_id, article, quantity, price_cents) VALUES (?, ?, ?, ?)",
        [(number, *line) for line in lines],
    )
db.execute("INSERT INTO orders VALUES (41, 'R-1041', 2, 1999)")  # its lines were never imported
for again, number in enumerate(range(31, 39), start=50):  # the second run
    db.execute("INSERT INTO orders SELECT ?, external_ref, customer_id, total_cents FROM orders WHERE id = ?", (again, number))
    db.execute(
        "INSERT INTO order_lines (order_id, article, quantity, price_cents) "
        "SELECT ?, article, quantity, price_cents FROM order_lines WHERE order_id = ?",
        (again, number),
    )
db.execute("INSERT INTO orders SELECT 70, external_ref, customer_id, 0 FROM orders WHERE id = 33")  # and a third
db.executemany(
    "INSERT INTO order_lines (order_id, article, quantity, price_cents) VALUES (?, ?, ?, ?)",
    [(900 + number, "ghost", 1, 100) for number in range(5)],
)
db.commit()
db.close()
