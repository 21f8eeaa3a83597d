#!/usr/bin/env python3
"""check_samples.py FILE: validates the samples of grammar_library_test against their schemas with the package jsonschema."""
import json
import sys

from jsonschema import Draft202012Validator


def main():
    wrong = count = 0
    for line in open(sys.argv[1], encoding="utf-8"):
        row = json.loads(line)
        errors = list(Draft202012Validator(row["schema"]).iter_errors(json.loads(row["text"])))
        count += 1
        if errors:
            wrong += 1
            print(json.dumps(row["schema"]), row["text"], errors[0].message, sep="\n  ")
    print(f"{count - wrong} of {count} samples are valid under their schemas")
    sys.exit(wrong > 0 or count < 1000)


if __name__ == "__main__":
    main()
