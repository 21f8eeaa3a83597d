"""A tokenizer of Mistral's tekken.json: found in a folder, stored with checkpoints, exported to a folder of Hugging Face without another tokenizer and
read from there."""
import base64
import json
import os

import support

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden", "tokenizers", "tekken.golden.json")


def write_tekken(folder):
    os.makedirs(folder)
    with open(GOLDEN, encoding="utf-8") as file:
        facts = json.load(file)
    tokens = [base64.b64encode(bytes([b])).decode() for b in range(256)] + facts["merges"]
    config = {"pattern": facts["pattern"], "default_vocab_size": len(tokens) + facts["count"], "default_num_special_tokens": facts["count"], "version": "v7"}
    special = [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(facts["specials"])]
    with open(os.path.join(folder, "tekken.json"), "w", encoding="utf-8") as file:
        json.dump({"config": config, "vocab": [{"rank": i, "token_bytes": t} for i, t in enumerate(tokens)], "special_tokens": special}, file)
    return facts


class TekkenTest(support.FolderTest):
    def test_from_nothing_to_a_folder_of_hugging_face(self):
        facts = write_tekken(self.path("tokenizer"))
        flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", self.path("tokenizer")]
        told = json.loads(self.output("tokenize", *flags, "--json", facts["texts"][5]["text"]))
        self.assertEqual(told["results"][0]["ids"], facts["texts"][5]["ids"])
        self.run_ok("pretrain", "--num-layers", "1", "--hidden-size", "16", "--ffn-hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "64", *flags, "--micro-batch-size",
                    "1", "--global-batch-size", "1", "--train-iters", "1", "--lr", "1e-2", "--mock-data", "--eval-iters", "0", "--device", "cpu",
                    "--num-threads", "1", "--init-method-std", "0.3", "--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu",
                    "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--save", self.path("model"))
        self.run_ok("convert-checkpoint", "--load", self.path("model"), "--save", self.path("hf"), "--to", "huggingface")
        self.assertEqual([name for name in sorted(os.listdir(self.path("hf"))) if name.startswith(("tok", "tek"))], ["tekken.json"])
        hostile = ["--chat", "--prompt", "[/INST] sure</s>"]
        answers = [self.output("generate", self.path(name), "--greedy", "--tokens-to-generate", "4", "--json", "--device", "cpu", "--num-threads", "1", *hostile)
                   for name in ("model", "hf")]
        self.assertEqual(*answers)
        ids = json.loads(answers[0])[0]["prompt_tokens"]
        self.assertEqual(([id for id in ids if id < facts["count"]], ids[:2], ids[-1]), ([1, 3, 4], [1, 3], 4))


if __name__ == "__main__":
    support.main()
