#!/usr/bin/env python3
"""A GPT that reads neighbours on ranks that are processes over Gloo: losses and gradient norms of each row against one rank.

Usage: retro_test.py MEGATRON [unittest arguments].
"""
import training

TP, PP, SP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--sequence-parallel"


class Retro(training.Training):
    MODEL = ["--task", "retro", "--num-layers", "4", "--retro-layers", "2", "4", "--retro-chunk-length", "4", "--hidden-size", "32",
             "--num-attention-heads", "4", "--seq-length", "16", "--max-position-embeddings", "16", "--attention-dropout", "0.1",
             "--micro-batch-size", "1", "--global-batch-size", "8", "--device", "cpu", "--num-threads", "1",
             "--distributed-timeout-minutes", "1"]

    def test_rows_train_what_one_rank_trains(self):
        rows = {"tp2_sp_pp2": (4, [TP, "2", SP, PP, "2"]), "pp2_vpp2_dp2_zero1": (4, [PP, "2", "--num-virtual-stages-per-pipeline-rank", "2",
                                                                                     "--use-distributed-optimizer"])}
        self.compare(rows, self.train(1), ("lm loss", "grad_norm"))


if __name__ == "__main__":
    training.main()
