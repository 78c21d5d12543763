"""Every framework on every dataset of the paper's table 1, on replayed models: `make matrix`.

| file | what |
|---|---|
| `repository.py` | one small repository with a bug, its hidden tests, answers; the images that hold it |
| `fixture.py` | what a fixture is |
| `rows_python.py`, `rows_languages.py`, `folders.py` | tasks as each dataset publishes them |
| `fixtures.py` | the list of them |
| `run.py` | submits everything and reads the results |
| `page.py` | docs/compatibility.md and its data |

A fixture has three tasks: `right` (its answer is right), `wrong` (its answer is not) and `peculiar` (its answer is
right, and it has what only this dataset has).
"""
