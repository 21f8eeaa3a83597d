#!/usr/bin/env python3
"""Encoders and encoder-decoders on ranks that are processes over Gloo: losses and gradient norms of each row against one rank.

Usage: encoders_test.py MEGATRON [unittest arguments].
"""
import training

TP, PP, CP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
LAYOUT, SP = "--pipeline-model-parallel-layout", "--sequence-parallel"


class Training(training.Training):
    MODEL = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16", "--attention-dropout", "0.1",
             "--micro-batch-size", "1", "--global-batch-size", "8", "--device", "cpu", "--num-threads", "1",
             "--distributed-timeout-minutes", "1"]


class Berts(Training):
    MODEL = [*Training.MODEL, "--task", "bert"]

    def test_rows_train_what_one_rank_trains(self):
        rows = {"tp2_sp_pp2": (4, [TP, "2", SP, PP, "2"]), "cp2_dp2_zero1": (4, [CP, "2", "--use-distributed-optimizer"])}
        self.compare(rows, self.train(1), ("lm loss", "sop loss", "grad_norm"))


class EncoderDecoders(Training):
    MODEL = [*Training.MODEL, "--task", "t5", "--decoder-seq-length", "8"]

    def test_rows_train_what_one_rank_trains(self):
        rows = {"pp3_homes": (3, [PP, "3", LAYOUT, "Ee|et|tL"]), "tp2_sp_dp2_zero1": (4, [TP, "2", SP, "--use-distributed-optimizer"]),
                "cp2_gather": (2, [CP, "2", "--cp-comm-type", "all_gather"])}
        self.compare(rows, self.train(1), ("lm loss", "grad_norm"))


if __name__ == "__main__":
    training.main()
