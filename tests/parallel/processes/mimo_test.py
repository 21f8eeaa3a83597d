#!/usr/bin/env python3
"""A GPT that reads images on ranks that are processes over Gloo: losses and gradient norms of each row against one rank.

Usage: mimo_test.py MEGATRON [unittest arguments].
"""
import training

TP, PP, SP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--sequence-parallel"


class Mimo(training.Training):
    MODEL = ["--task", "mimo", "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "24",
             "--position-embedding-type", "rope", "--attention-dropout", "0.1", "--vision-model-type", "clip", "--vision-num-layers", "2",
             "--vision-hidden-size", "16", "--vision-ffn-hidden-size", "24", "--vision-num-attention-heads", "2", "--img-h", "8", "--img-w",
             "8", "--patch-dim", "4", "--disable-vision-class-token", "--image-token-id", "500", "--micro-batch-size", "2",
             "--global-batch-size", "8", "--device", "cpu", "--num-threads", "1", "--distributed-timeout-minutes", "1"]

    def test_rows_train_what_one_rank_trains(self):
        zero3 = ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params", "--overlap-grad-reduce",
                 "--overlap-param-gather"]
        rows = {"tp2_sp_pp2": (4, [TP, "2", SP, PP, "2"]), "tp2_dp2_zero3": (4, [TP, "2", *zero3])}
        self.compare(rows, self.train(1), ("lm loss", "grad_norm"))


if __name__ == "__main__":
    training.main()
