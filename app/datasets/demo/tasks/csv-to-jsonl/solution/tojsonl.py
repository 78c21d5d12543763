"""CSV in, one JSON object per record out: python3 tojsonl.py [--columns NAME,NAME...] [FILE]"""

import argparse
import csv
import io
import json
import re
import sys

WHOLE = re.compile(r"-?(0|[1-9][0-9]*)")
DECIMAL = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def typed(field):
    if field == "":
        return None
    if field.lower() in ("true", "false"):
        return field.lower() == "true"
    if WHOLE.fullmatch(field):
        return int(field)
    if DECIMAL.fullmatch(field):
        return float(field)
    return field


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--columns")
    parser.add_argument("file", nargs="?", default="-")
    chosen = parser.parse_args()
    source = sys.stdin.buffer if chosen.file == "-" else open(chosen.file, "rb")
    reader = csv.reader(io.TextIOWrapper(source, encoding="utf-8-sig", newline=""))
    out = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", newline="\n", write_through=True)
    header = next(reader, [])
    columns = chosen.columns.split(",") if chosen.columns else header
    unknown = [name for name in columns if name not in header]
    if unknown:
        print(f"no such column: {', '.join(unknown)}", file=sys.stderr)
        return 65
    begins = reader.line_num + 1
    for record in reader:
        if len(record) != len(header):
            if record:
                print(f"line {begins}: {len(record)} fields, the header has {len(header)}", file=sys.stderr)
                return 66
        else:
            fields = dict(zip(header, record))
            print(json.dumps({name: typed(fields[name]) for name in columns}, ensure_ascii=False), file=out)
        begins = reader.line_num + 1
    return 0


sys.exit(main())
