"""Checks that `transformers` knows the class and the special tokens of what `megatron train-tokenizer` writes, and encodes as it does.
Run: python check_config.py path/to/megatron (transformers 5, no torch needed)
"""
import json
import os
import subprocess
import sys
import tempfile

from transformers import AutoTokenizer

HERE = os.path.dirname(os.path.abspath(__file__))


def main(binary):
    with tempfile.TemporaryDirectory() as folder:
        output = os.path.join(folder, "tokenizer.json")
        subprocess.run([binary, "train-tokenizer", "--input", os.path.join(HERE, "learn.jsonl"), "--vocab-size", "400", "--output", output],
                       check=True, stdout=subprocess.DEVNULL)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        text = "What is it , then?  Nothing 's lost."
        ours = subprocess.run([binary, "tokenize", "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", output, "--json", text],
                              check=True, capture_output=True, text=True)
        ids = [token["id"] if isinstance(token, dict) else token for token in json.loads(ours.stdout)["results"][0]["ids"]]
        print(type(tokenizer).__name__, tokenizer.eos_token, tokenizer.eos_token_id)
        assert tokenizer.eos_token == "<|endoftext|>", tokenizer.eos_token
        assert tokenizer(text)["input_ids"] == ids, (tokenizer(text)["input_ids"], ids)
        assert tokenizer.decode(ids) == text, tokenizer.decode(ids)


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[1]))
