"""What the generators of vectors of texts share."""
import json
import os


def write_vectors(folder, texts, rows):
    """vectors.json: {"texts": [...], kind: a vector for each text, ...}, of numbers with nine digits."""
    rows = {kind: [[float(f"{x:.9g}") for x in row] for row in vectors] for kind, vectors in rows.items()}
    with open(os.path.join(folder, "vectors.json"), "w", encoding="utf-8") as file:
        json.dump({"texts": texts} | rows, file, ensure_ascii=False)
        file.write("\n")
