#!/usr/bin/env python3
"""Models whose layers are letters, with states, on ranks that are processes over Gloo: losses and gradient norms of each row against one rank.

Usage: hybrids_test.py MEGATRON [unittest arguments].
"""
import training

PATTERN, TP, PP = "--hybrid-layer-pattern", "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
CP, SP, ZERO1 = "--context-parallel-size", "--sequence-parallel", "--use-distributed-optimizer"


class Hybrids(training.Training):
    MODEL = [PATTERN, "GM*-MG-", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16", "--position-embedding-type",
             "none", "--normalization", "RMSNorm", "--disable-bias-linear", "--attention-output-gate", "--mamba-num-heads", "4",
             "--mamba-head-dim", "6", "--mamba-state-dim", "4", "--mamba-num-groups", "2", "--mamba-chunk-size", "3",
             "--linear-num-key-heads", "2", "--linear-num-value-heads", "4", "--linear-key-head-dim", "6", "--linear-value-head-dim", "4",
             "--linear-chunk-size", "2", "--norm-epsilon", "0.1", "--attention-dropout", "0", "--hidden-dropout", "0.1", "--reset-position-ids",
             "--reset-attention-mask", "--eod-mask-loss", "--micro-batch-size", "2", "--global-batch-size", "8", "--device", "cpu",
             "--num-threads", "1", "--distributed-timeout-minutes", "1"]

    def test_rows_train_what_one_rank_trains(self):
        rows = {"tp2_sp_cp2": (4, [TP, "2", SP, CP, "2"]), "pp2_bars_dp2_zero1": (4, [PP, "2", ZERO1, PATTERN, "GM*-|MG-"]),
                "cp2_zero3": (2, [CP, "2", "--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params"])}
        self.compare(rows, self.train(1), ("lm loss", "grad_norm"))


if __name__ == "__main__":
    training.main()
