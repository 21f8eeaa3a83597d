#!/usr/bin/env python3
"""Scores of answers by lmms-eval 0.7.3, whose functions are those that the benchmarks published: VQA's (without its table of contractions),
ANLS, relaxed accuracy. Writes answer_scores.json beside this file.

    pip download --no-deps lmms_eval==0.7.3 && unzip -q lmms_eval-*.whl -d lmms
    make_answer_scores.py lmms
"""
import ast
import json
import os
import re
import statistics
import sys

CASES = [
    ("Two", ["2", "2", "two.", "3", "2", "two", "Two!", "2", "2", "2"]),
    ("a dog", ["dog", "dog", "the dog", "cat", "cat", "cat", "cat", "cat", "cat", "cat"]),
    ("an apple", ["apple", "apple", "apples", "pear", "pear", "pear", "pear", "pear", "pear", "pear"]),
    ("dog", ["dog", "dog", "dog", "cat", "cat", "cat", "cat", "cat", "cat", "cat"]),
    ("none", ["0", "none", "zero", "no", "no", "no", "no", "no", "no", "no"]),
    ("red, white and blue", ["red white and blue"] * 5 + ["blue"] * 5),
    ("3.5", ["3.5", "3.5", "35", "3.5", "4", "4", "4", "4", "4", "4"]),
    ("Yes.", ["yes", "yes", "yes", "yes", "no", "no", "no", "no", "no", "no"]),
    ("nothing", ["yes"] * 10),
    ("40%", ["0.4", "41%"]),
    ("39", ["40"]),
    ("37", ["40"]),
    ("Blue", ["blue"]),
    ("+3", ["3"]),
    ("1e2", ["104", "96"]),
    ("0", ["0"]),
    ("-5", ["-5.2"]),
    ("12 June 1984", ["12 june 1984", "June 12 1984"]),
    ("12 Jun 1984", ["12 june 1984"]),
    ("M\u00fcller & S\u00f6hne", ["M\u00dcLLER & S\u00d6HNE", "Muller"]),
    ("abcd", ["wxyz"]),
    ("ab", ["ax"]),
    ("ab", ["xyz ab"]),
]


def source(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def function(path, name, scope):
    """One function of a file whose imports are not needed."""
    for node in ast.parse(source(path)).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            node.decorator_list = []
            exec(compile(ast.Module([node], []), path, "exec"), scope)
            return scope[name]
    raise KeyError(name)


def main():
    root = os.path.join(sys.argv[1], "lmms_eval")
    scope = {"re": re, "statistics": statistics}
    exec(compile(source(os.path.join(root, "tasks", "_task_utils", "vqa_eval_metric.py")), "vqa", "exec"), scope)
    plain = scope["EvalAIAnswerProcessor"]()
    plain.CONTRACTIONS = {}
    metrics = os.path.join(root, "api", "metrics.py")
    function(metrics, "levenshtein_distance", scope)
    anls = function(metrics, "anls", scope)
    relaxed = function(os.path.join(root, "tasks", "chartqa", "utils.py"), "relaxed_correctness", scope)
    scope["eval_ai_processor"] = plain
    scope["EvalAIAnswerProcessor"] = lambda: plain
    vqa = function(os.path.join(root, "tasks", "textvqa", "utils.py"), "textvqa_process_results", scope)
    rows = []
    for answer, right in CASES:
        row = {"answer": answer, "right": right, "anls": anls(right, [answer])["anls"],
               "relaxed": float(any(relaxed(answer, target) for target in right))}
        if len(right) == 10:
            row["vqa"] = vqa({"answers": list(right), "question_id": 0}, [answer])["exact_match"]
        rows.append(row)
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "answer_scores.json"), "w", encoding="utf-8") as file:
        file.write("[" + ",\n".join(json.dumps(row) for row in rows) + "]\n")


if __name__ == "__main__":
    main()
