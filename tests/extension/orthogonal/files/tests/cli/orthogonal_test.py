#!/usr/bin/env python3
"""`megatron pretrain --optimizer orthogonal`: a resumed run has the bits of an uninterrupted one.

Usage: orthogonal_test.py BINARY [unittest arguments]. Needs nothing but the standard library.
"""
import os
import shutil

import parallel_test as ranks
import support

RUN = ["pretrain", *ranks.MODEL, *ranks.RUN, "--optimizer", "orthogonal", "--save-interval", "3"]
LAYOUTS = {
    "one": (1, []),
    "dp2_zero1": (2, ["--use-distributed-optimizer", "--overlap-grad-reduce"]),
    "tp2_sp": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
}


class OrthogonalTest(support.FolderTest):
    def train(self, count, *flags):
        ranks.BINARY = support.BINARY
        codes, out, error = ranks.finish(ranks.start(count, [*RUN, *flags]))
        self.assertEqual(set(codes), {0}, error + out)

    def test_resumed_runs_have_the_same_bits(self):
        for name, (count, flags) in LAYOUTS.items():
            with self.subTest(name):
                whole, resumed = self.path(name), self.path(name + "_resumed")
                self.train(count, *flags, "--save", whole)
                shutil.copytree(os.path.join(whole, "iter_0000003"), os.path.join(resumed, "iter_0000003"))
                self.train(count, *flags, "--load", resumed, "--save", resumed)
                expected = ranks.tensors(whole, 6)
                momenta = [key for key in expected if key.startswith("optimizer.state.momentum_buffer.")]
                self.assertEqual(len(momenta), 4 * 4)  # the matrices of four layers
                self.assertFalse([key for key in momenta if key.replace("momentum_buffer", "exp_avg") in expected])
                self.assertNotEqual(expected[momenta[0]], ranks.tensors(whole, 3)[momenta[0]])
                self.assertEqual(ranks.tensors(resumed, 6), expected)


if __name__ == "__main__":
    support.main()
