"""Writes conversations.parquet: rows as `datasets` stores them, where members that only some messages have are null in others.

Made with pyarrow 26. Run: python make_parquet.py
"""
import os

import pyarrow as pa
import pyarrow.parquet as pq

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(pa.struct([
    ("function", pa.struct([("name", pa.string()), ("arguments", pa.string())]))])))]))
ROWS = [
    [{"role": "user", "content": 'a "quoted"\nline\t\\ \u00e9'}, {"role": "assistant", "content": "b"}],
    [{"role": "user", "content": "now?"},
     {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "clock", "arguments": "{}"}}]},
     {"role": "tool", "content": "12"}, {"role": "assistant", "content": "noon"}],
]
table = pa.table({"id": pa.array([7, 8]), "messages": pa.array(ROWS, MESSAGES), "score": pa.array([0.5, None]),
                  "good": pa.array([True, False])})
pq.write_table(table, os.path.join(os.path.dirname(os.path.abspath(__file__)), "conversations.parquet"), compression="snappy")
