"""One way to name an input: without a flag, or behind --load (models, checkpoints, runs) or --input (texts, data); "-" is standard input."""
import json
import os
import subprocess

import support
from support import FolderTest, call

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden", "hf")


def feed(text, *arguments):
    """Runs the binary with `text` on its standard input."""
    return subprocess.run([support.BINARY, *arguments], input=text, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120,
                          env=dict(os.environ, OMP_NUM_THREADS="1"))


class InputTest(FolderTest):
    def test_both_spellings_name_the_same_input(self):
        nowhere = self.path("nowhere")
        out = self.path("out")
        commands = {
            ("generate", "--load"): ["--prompt", "a"],
            ("logits", "--load"): ["--tokens", "1"],
            ("evaluate", "--load"): ["--tasks", "perplexity=" + __file__],
            ("convert-checkpoint", "--load"): ["--save", out],
            ("inspect-checkpoint", "--load"): [],
            ("report", "--load"): [],
            ("inspect-dataset", "--input"): [],
            ("inspect-chat", "--input"): ["--tokenizer-type", "ByteLevelTokenizer", "--chat-template", "{{ messages }}"],
            ("preprocess-data", "--input"): ["--output-prefix", out, "--tokenizer-type", "ByteLevelTokenizer"],
            ("train-tokenizer", "--input"): ["--output", out],
        }
        for (command, flag), rest in commands.items():
            for spelling in ([nowhere], [flag, nowhere]):
                with self.subTest(command=command, spelling=spelling[0]):
                    result = call(command, *spelling, *rest)
                    self.assertEqual(result.returncode, 1, result.stderr)
                    self.assertIn(nowhere, result.stderr)

    def test_standard_input(self):
        result = feed("a text\n", "tokenize", "--tokenizer-type", "ByteLevelTokenizer", "--input", "-", "--json")
        self.assertEqual(json.loads(result.stdout)["results"][0]["text"], "a text\n", result.stderr)
        gpt2 = os.path.join(GOLDEN, "gpt2")
        result = feed("5 6 7\n1 2\n", "generate", gpt2, "--prompts-file", "-", "--tokens-to-generate", "2", "--greedy", "--ignore-eod", "--json")
        self.assertEqual([len(reply["tokens"]) for reply in json.loads(result.stdout)], [2, 2], result.stderr)
        row = json.dumps({"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]})
        template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        result = feed(row + "\n", "inspect-chat", "-", "--tokenizer-type", "ByteLevelTokenizer", "--chat-template", template, "--json")
        self.assertIn("user: hello", json.loads(result.stdout)["text"], result.stderr)


if __name__ == "__main__":
    support.main()
