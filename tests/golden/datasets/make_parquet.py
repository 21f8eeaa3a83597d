"""Writes rows.parquet: python make_parquet.py (pyarrow 26). Several row groups, zstd."""
import os

import pyarrow as pa
import pyarrow.parquet as pq

rows = 1000
table = pa.table({
    "number": list(range(rows)),
    "text": [f"row {i} " + "x" * (i % 50) if i % 50 else ("" if i == 0 else f"row {i} ") for i in range(rows)],
    "maybe": [None if i == 500 else "y" for i in range(rows)],
})
pq.write_table(table, os.path.join(os.path.dirname(os.path.abspath(__file__)), "rows.parquet"), row_group_size=300,
               compression="zstd")
