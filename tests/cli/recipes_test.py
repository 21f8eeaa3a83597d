"""`megatron check` of recipes and of published models with experts: they are legal, and have as many parameters as published."""
import json
import os
import re
import sys
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import support

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
# A vocabulary that no recipe pads beyond its own; the data does not matter to a plan.
DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 31999"
LLAMA_LIKE = ("--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
              "--hidden-dropout 0 --attention-dropout 0 --seq-length 4096 --micro-batch-size 1 --global-batch-size 16 --lr 1e-4 "
              "--train-iters 10 --bf16")

PUBLISHED = {
    "mixtral 8x7b": (46_702_792_704, 16, "--config recipes/mixtral_8x7b.yaml"),
    "qwen3 30b-a3b": (30_532_122_624, 16, "--config recipes/qwen3_30b_a3b.yaml"),
    "deepseek v3 without its layer of a further token": (
        671_026_404_352, 2048,
        "--config recipes/deepseek_v3.yaml --mtp-num-layers 0 --mtp-loss-scaling-factor 0.1 "
        "--pipeline-model-parallel-layout Et|" + "tttt|" * 14 + "ttttL"),
    "mamba2 2.7b": (2_702_599_680, 1, "--config recipes/mamba2_2_7b.yaml"),
    "13 layers of nemotron-h 8b": (2_830_522_624, 1, "--config recipes/nemotron_h_8b_13letters.yaml"),
    "the same over two context ranks": (2_830_522_624, 2, "--config recipes/nemotron_h_8b_13letters_cp2.yaml"),
    "16 letters of qwen3.5 9b": (3_764_131_968, 1, "--config recipes/qwen3_5_9b_16letters.yaml"),
    "llama 3.2 1b behind 23 layers of clip vit-l/14": (1_795_687_424, 1, "--config recipes/mimo_clip_llama.yaml"),
    "8 experts, top 2": (3_033_696_256, 1, "--config recipes/moe_8x_top2.yaml"),
    "qwen2 57b-a14b": (
        57_408_658_944, 8,
        "--num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28 --group-query-attention --num-query-groups 4 "
        "--add-qkv-bias --num-experts 64 --moe-router-topk 8 --moe-ffn-hidden-size 2560 --moe-router-pre-softmax "
        "--moe-shared-expert-intermediate-size 20480 --moe-shared-expert-gate --padded-vocab-size 151936 " + LLAMA_LIKE),
    "olmoe": (
        6_919_161_856, 8,
        "--num-layers 16 --hidden-size 2048 --ffn-hidden-size 1024 --num-attention-heads 16 --qk-layernorm --qk-layernorm-over-heads "
        "--num-experts 64 --moe-router-topk 8 --moe-router-pre-softmax --padded-vocab-size 50304 " + LLAMA_LIKE),
    "deepseek v2 lite": (
        15_706_484_224, 8,
        "--num-layers 27 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 --multi-latent-attention --kv-lora-rank 512 "
        "--qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm --num-experts 64 --moe-router-topk 6 "
        "--moe-router-pre-softmax --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 2816 --moe-layer-freq [0]+[1]*26 "
        "--padded-vocab-size 102400 " + LLAMA_LIKE),
}


class Recipes(support.FolderTest):
    def parameters(self, flags, ranks):
        text = self.output("check", *flags.split(), *DATA.split(), "--world-size", str(ranks))
        return int(re.search(r"of ([0-9,]+) parameters", text).group(1).replace(",", ""))

    def test_published_numbers_of_parameters(self):
        os.chdir(ROOT)
        for name, (parameters, ranks, flags) in PUBLISHED.items():
            with self.subTest(name):
                self.assertEqual(self.parameters(flags, ranks), parameters)

    def test_thousands_of_ranks_at_a_load_take_seconds(self):
        os.chdir(ROOT)
        for ranks in (2048, 10240):
            with self.subTest(ranks):
                begin = time.monotonic()
                report = json.loads(self.output("check", "--config", "recipes/deepseek_v3.yaml", *DATA.split(), "--world-size", str(ranks),
                                                "--global-batch-size", "30720", "--load-factor", "1.5", "--json"))
                self.assertLess(time.monotonic() - begin, 10)
                loads = {load["name"]: load for load in report["expert_loads"]}
                self.assertEqual([loads[name]["load"] for name in ("balance", "--load-factor")], [1, 1.5])
                self.assertEqual(loads["--load-factor"]["rows"], 3 * loads["balance"]["rows"] // 2)
                self.assertGreater(loads["worst case"]["allocated"], loads["--load-factor"]["allocated"])
                self.assertEqual(loads["--load-factor"]["allocated"],
                                 max(stage["memory_bytes"]["allocated"] for stage in report["stages"]))
                self.assertIn("edp", report["stages"][1]["sent_bytes"])

    def test_a_load_is_between_balance_and_the_worst_case(self):
        os.chdir(ROOT)
        for load, flags, message in (("0.5", "", "expected 1, balance, to"), ("100", "", "where every token chooses the experts of one rank"),
                                     ("2", "--expert-model-parallel-size 1", "every rank has all experts")):
            with self.subTest(load=load):
                result = support.call("check", "--config", "recipes/qwen3_30b_a3b.yaml", *DATA.split(), "--world-size", "16",
                                      "--load-factor", load, *flags.split())
                self.assertNotEqual(result.returncode, 0)
                self.assertIn(message, result.stderr)


if __name__ == "__main__":
    support.main()
