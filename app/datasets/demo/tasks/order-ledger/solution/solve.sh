#!/bin/bash
set -eu
cd "${WORKDIR:-/app}"
python3 - <<'END'
import sqlite3

db = sqlite3.connect("shop.db")
db.executescript(
    """
    BEGIN;
    DELETE FROM orders WHERE id NOT IN (SELECT min(id) FROM orders GROUP BY external_ref);
    DELETE FROM order_lines WHERE order_id NOT IN (SELECT id FROM orders);
    UPDATE orders SET total_cents = (
        SELECT coalesce(sum(quantity * price_cents), 0) FROM order_lines WHERE order_id = orders.id
    );
    CREATE UNIQUE INDEX orders_external_ref ON orders (external_ref);
    COMMIT;
    """
)
END
