"""Benchmarks: one harness for every provider, records in JSON, plots and the README's table made from them.

    python -m benchmarks.run       time the cells, print the table, write benchmarks/results/h200.json
    python -m benchmarks.plot      draw the record
    python -m benchmarks.readme    put the record's tables into README.md
    python -m benchmarks.train_gpt train a small GPT with our attention and with torch's, write results/training.json

The installed flash_attn3 is measured: `python -m` puts the checkout first on sys.path, where a flash_attn3 without its
extension would hide it, so the checkout goes to the end.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
RECORD = RESULTS / "h200.json"

sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT] + [str(ROOT)]
