"""Writes metrics.json: predictions, labels and what scikit-learn and SciPy say of them, the last cases with values that are all equal.

Made with scikit-learn 1.9.1, SciPy 1.17.1, NumPy. Run: python make_metrics_golden.py
"""
import json
import os
import random

from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef


def main():
    draw = random.Random(3)
    classes, numbers = [], []
    for count, size in ((2, 40), (3, 50), (2, 5), (2, 4)):
        labels = [draw.randrange(count) if size > 4 else 0 for _ in range(size)]
        guesses = [label if draw.random() < 0.6 else draw.randrange(count) for label in labels] if size > 4 else [0] * size
        case = dict(classes=count, predicted=guesses, labels=labels, accuracy=accuracy_score(labels, guesses),
                    matthews=matthews_corrcoef(labels, guesses))
        if count == 2:
            case["f1"] = f1_score(labels, guesses, zero_division=0)
        classes.append(case)
    for size in (30, 6):
        labels = [round(draw.uniform(0, 5), 1) for _ in range(size)]
        guesses = [round(x + draw.gauss(0, 1.5), 1 if size == 30 else 3) for x in labels]
        numbers.append(dict(predicted=guesses, labels=labels, pearson=pearsonr(guesses, labels)[0], spearman=spearmanr(guesses, labels)[0]))
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "metrics.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(dict(classes=classes, numbers=numbers), file)
        file.write("\n")


if __name__ == "__main__":
    main()
