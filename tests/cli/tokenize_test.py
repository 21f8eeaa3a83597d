"""The commands of docs/bringing_a_tokenizer.md, run as they are written, and what `megatron tokenize` prints."""

import json
import pathlib
import subprocess
import sys
import tempfile

MEGATRON = pathlib.Path(sys.argv[1]).resolve()
ROOT = pathlib.Path(__file__).resolve().parents[2]
KINDS = ROOT / "tests/golden/tokenizers/kinds"


def tokenize(*arguments):
    return subprocess.run([MEGATRON, "tokenize", *map(str, arguments)], capture_output=True, text=True)


def run_document(folder):
    """Runs the first block of the page in a folder that looks like the repository."""
    block = (ROOT / "docs/bringing_a_tokenizer.md").read_text(encoding="utf-8").split("```")[1]
    for name in ("tests", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "build/bin").mkdir(parents=True)
    (folder / "build/bin/megatron").symlink_to(MEGATRON)
    done = subprocess.run(["bash", "-euc", block], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the same text") == 3, done.stdout
    assert (folder / "readme_text_document.idx").exists(), list(folder.iterdir())


def main():
    with tempfile.TemporaryDirectory() as name:
        run_document(pathlib.Path(name))
        broken = pathlib.Path(name) / "broken.txt"
        broken.write_bytes(b"Hello\xff world")
        flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", KINDS / "bert.json", "--json"]
        done = tokenize(*flags, "--add-special-tokens", "--input", broken, "hello")
        assert done.returncode == 0, done.stderr
        printed = json.loads(done.stdout)
        plain, file = printed["results"]
        assert plain["text"] == "hello" and plain["replaced"] == 0 and file["replaced"] == 1, printed
        assert plain["decoded"] == "[CLS] hello [SEP]", plain
        assert len(plain["ids"]) == len(plain["tokens"]) and max(plain["ids"]) < printed["vocab_size"], plain
    assert json.loads(tokenize(*flags, "hello").stdout)["results"][0]["ids"] == plain["ids"][1:-1]
    done = tokenize(*flags[:-1])
    assert done.returncode == 2 and "no text is given" in done.stderr, done.stderr
    done = tokenize("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", KINDS / "bert.json", "x")
    assert done.returncode == 1 and "no SentencePiece model" in done.stderr, done.stderr


if __name__ == "__main__":
    main()
