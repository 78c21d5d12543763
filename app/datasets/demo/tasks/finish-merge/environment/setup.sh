#!/bin/sh
# A repository in the middle of a conflicted merge. WORKDIR: where (default /app).
set -eu
umask 022
target=${WORKDIR:-/app}
mkdir -p "$target"
cd "$target"

export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
export GIT_AUTHOR_DATE='2024-03-01T10:00:00+0000' GIT_COMMITTER_DATE='2024-03-01T10:00:00+0000'
git -c init.defaultBranch=main init --quiet --template=
git config user.name shop
git config user.email shop@example.invalid
git config commit.gpgSign false
git config core.autocrlf false

cat >prices.py <<'END'
"""Prices of the shop, in cents."""


def total(items):
    """The sum of price times quantity over pairs of both."""
    return sum(price * quantity for price, quantity in items)
END
printf '# Changes\n\n- Prices are whole cents.\n' >CHANGES.md
git add .
git commit --quiet -m "Prices in cents"

git checkout --quiet -b vat
cat >prices.py <<'END'
"""Prices of the shop, in cents."""


def total(items, *, vat_percent=0):
    """The sum of price times quantity over pairs of both, with VAT added (rounded down)."""
    amount = sum(price * quantity for price, quantity in items)
    return amount + amount * vat_percent // 100
END
cat >receipt.py <<'END'
"""Prints a receipt: python3 receipt.py PRICE QUANTITY [PRICE QUANTITY ...]"""

import sys

from prices import total

numbers = [int(word) for word in sys.argv[1:]]
print(f"total {total(list(zip(numbers[::2], numbers[1::2])), vat_percent=19)} cents")
END
printf '# Changes\n\n- VAT can be added to a total.\n- Prices are whole cents.\n' >CHANGES.md
git add .
git commit --quiet -m "VAT and receipts"

git checkout --quiet main
cat >prices.py <<'END'
"""Prices of the shop, in cents."""


def total(items, *, discount_percent=0):
    """The sum of price times quantity over pairs of both, less a discount (the reduction rounded down)."""
    amount = sum(price * quantity for price, quantity in items)
    return amount - amount * discount_percent // 100
END
printf '# Changes\n\n- A discount can be given on a total.\n- Prices are whole cents.\n' >CHANGES.md
git add .
git commit --quiet -m "Discounts"

if git merge vat >/dev/null 2>&1; then
    echo "expected the merge to conflict" >&2
    exit 70
fi
mkdir -p .git/info
printf '%s\n' '__pycache__/' '.pytest_cache/' >.git/info/exclude
