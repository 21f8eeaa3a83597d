"""Writes text_metrics.json: pairs of texts and what rouge-score (F1 of rouge1, rouge2 and rougeL, without stemming) and compute_f1, SQuAD's metric in
transformers, say of each. Exact match is the equality of the texts without the white space around them.

Made with rouge-score 0.1.2, transformers 4.57.1 (the last versions with that metric are those before 5). Run: python make_text_metrics_golden.py
"""
import json
import os
import random

from rouge_score.rouge_scorer import RougeScorer
from transformers.data.metrics.squad_metrics import compute_f1

ROUGE = ["rouge1", "rouge2", "rougeL"]
PAIRS = [
    ("The cat sat on the mat.", "the cat sat on the mat"),
    ("The cat sat on the mat.", "a cat sat, on a mat!"),
    (" same text\n", "same text"),
    ("", ""),
    ("", "something"),
    ("something", ""),
    ("...", "?!"),
    ("the", "an a"),
    ("the the the the", "the the"),
    ("one two one two one", "two one two"),
    ("state-of-the-art results", "state of the art results"),
    ("It's 3.14, isn't it?", "its 314 isnt it"),
    ("_the_ the_ other", "the other"),
    ("\u00c9t\u00e9 \u00e0 la plage", "\u00e9t\u00e9 a la plage"),
    ("\u212a and \u0130s", "k and is"),
    ("\u201cthe\u201d dog\u2014the cat", "dog cat"),
    ("na\u00efve the\u00e9 an\u00b2 a\u0301 x\u00b2", "naive thee an2 a x2"),
    ("\u4e2d\u6587 the \u6587\u5b57", "\u4e2d\u6587 \u6587\u5b57"),
    ("tab\there\u00a0and\u3000there", "tab here and there"),
    ("\u039f\u0394\u039f\u03a3 \u03a3 \u1e9e", "\u03bf\u03b4\u03bf\u03c2 \u03c3 \u00df"),
    ("a b c d e f g", "g f e d c b a"),
]


def drawn(draw, words):
    """A text and one that differs from it in some words."""
    text = [draw.choice(words) for _ in range(draw.randrange(1, 40))]
    other = [word if draw.random() < 0.7 else draw.choice(words) for word in text if draw.random() < 0.9]
    return " ".join(other), " ".join(text)


def main():
    draw = random.Random(5)
    words = "the a an cat Dog sat. ran, over under 12 3rd x-y don't (maybe) \u00fcber the; quick brown-fox".split()
    scorer = RougeScorer(ROUGE, use_stemmer=False)
    cases = []
    for written, expected in PAIRS + [drawn(draw, words) for _ in range(40)]:
        scores = scorer.score(expected, written)
        cases.append({"written": written, "expected": expected, "exact_match": float(written.strip() == expected.strip()),
                      "token_f1": float(compute_f1(expected, written)), **{name: scores[name].fmeasure for name in ROUGE}})
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "text_metrics.json"), "w", encoding="utf-8") as file:
        file.write("[\n" + ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases) + "\n]\n")


if __name__ == "__main__":
    main()
